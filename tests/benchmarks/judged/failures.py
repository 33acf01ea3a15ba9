"""Of the claims of what goes wrong: inputs of all kinds, deaths, and saving beside training."""

import claims

from tests.benchmarks.judged import NAN, Judged

JUDGED: Judged = {
    "background_saving": (
        lambda: claims.background_saving({"pp 2": 0.04}, {"pp 2": 1.0}),
        [
            lambda: claims.background_saving({"pp 2": 0.06}, {"pp 2": 1.0}),
            lambda: claims.background_saving({"pp 2": NAN}, {"pp 2": 1.0}),
            lambda: claims.background_saving({"pp 2": 0.01}, {"pp 2": 1.1}),
        ],
    ),
    "adversaries": (
        lambda: claims.adversaries({"0": "", "1": ""}, 20.0, 2),
        [
            lambda: claims.adversaries({"0": "", "1": "it trained in silence"}, 20.0, 2),
            lambda: claims.adversaries({"0": ""}, 20.0, 2),
            lambda: claims.adversaries({"0": ""}, 71.0, 1),
            lambda: claims.adversaries({}, 0.0, 1),
        ],
    ),
    "faults": (
        lambda: claims.faults({"0": []}, [], 1),
        [
            lambda: claims.faults({"0": ["rank 1 did not end"]}, [], 1),
            lambda: claims.faults({"0": []}, ["a file"], 1),
            lambda: claims.faults({"0": []}, [], 2),
            lambda: claims.faults({}, [], 1),
        ],
    ),
    "checkpoint_kills": (
        lambda: claims.checkpoint_kills(100, 30, [], 100),
        [
            lambda: claims.checkpoint_kills(99, 99, [], 100),
            lambda: claims.checkpoint_kills(100, 29, [], 100),
            lambda: claims.checkpoint_kills(100, 30, ["pp 2: lost"], 100),
            lambda: claims.checkpoint_kills(0, 0, [], 0),
        ],
    ),
    "fuzz": (
        lambda: claims.fuzz({"plans": (10, [])}, 10),
        [
            lambda: claims.fuzz({"plans": (10, ["KeyError"])}, 10),
            lambda: claims.fuzz({"plans": (9, [])}, 10),
            lambda: claims.fuzz({}, 10),
        ],
    ),
}  # fmt: skip
