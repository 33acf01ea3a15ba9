"""Of the claims of what plans say: seconds, answers of the search, and how long that takes."""

import claims

from tests.benchmarks.judged import NAN, Judged

FOUND = {"torch_losses": [7.0, 6.0], "jax_losses": [7.0, 6.0], "torch": [1.01], "jax": [1.1], "jax_compiled": [1.0]}
TWO_RANKS = {str(plan): 0.05 for plan in range(9)} | {"9": 0.1}
EDITED = {"refused": 100, "rescored": 25, "commands": 31}
EDITS = {(name, framework): EDITED for name in "abcd" for framework in ("torch", "jax")}
ERRORS = {"one node": 0.064, "held out": 0.059, "22B to 1T": 0.01, "T4": 0.06, "T4 ranks": 0.97, "large": 0.04}
WITHOUT = {str(constant): ERRORS for constant in range(28)}
ORIGINS = dict.fromkeys(WITHOUT, "Fitted: on a table")

JUDGED: Judged = {
    "edited_plans": (
        lambda: claims.edited_plans(EDITS),
        [
            lambda: claims.edited_plans(EDITS | {("a", "jax"): EDITED | {"wrong": 1}}),
            lambda: claims.edited_plans(EDITS | {("a", "jax"): {"refused": 125, "commands": 31}}),
            lambda: claims.edited_plans({("a", "jax"): EDITED}),
            lambda: claims.edited_plans({models: {"refused": 100, "rescored": 25} for models in EDITS}),
            lambda: claims.edited_plans({}),
        ],
    ),
    "mixed_clusters": (
        lambda: claims.mixed_clusters({"GPT": (1.0, [None, 1.0])}),
        [
            lambda: claims.mixed_clusters({"GPT": (1.0, [None, 0.99])}),
            lambda: claims.mixed_clusters({"GPT": (NAN, [1.0])}),
            lambda: claims.mixed_clusters({"GPT": (1.0, [None])}),
            lambda: claims.mixed_clusters({}),
        ],
    ),
    "few_microbatches": (
        lambda: claims.few_microbatches([0.0, 0.005], 2, 0.005),
        [
            lambda: claims.few_microbatches([0.0, 0.0051], 2, 0.005),
            lambda: claims.few_microbatches([0.0, NAN], 2, 0.005),
            lambda: claims.few_microbatches([0.0], 2, 0.005),
            lambda: claims.few_microbatches([], 0, 0.005),
        ],
    ),
    "host_time": (
        lambda: claims.host_time({"gpt2": -0.3}, {"forward": 0.5}, 0.25),
        [
            lambda: claims.host_time({"gpt2": -0.31}, {"forward": 0.25}, 0.25),
            lambda: claims.host_time({"gpt2": NAN}, {}, 0.25),
            lambda: claims.host_time({}, {"forward": 0.76}, 0.25),
            lambda: claims.host_time({}, {"forward": 0.08}, 0.25),
            lambda: claims.host_time({}, {}, 0.25),
        ],
    ),
    "step_time": (
        lambda: claims.step_time(TWO_RANKS, {"pp 4": -0.15}, {"pp 4": [1.0, 1.03]}, []),
        [
            lambda: claims.step_time(TWO_RANKS | {"9": -0.11}, {}, {}, []),
            lambda: claims.step_time(TWO_RANKS | {"8": 0.06}, {}, {}, []),
            lambda: claims.step_time(TWO_RANKS | {"0": NAN}, {}, {}, []),
            lambda: claims.step_time(TWO_RANKS, {"pp 4": 0.16}, {}, []),
            lambda: claims.step_time(TWO_RANKS, {"pp 4": NAN}, {}, []),
            lambda: claims.step_time(TWO_RANKS, {}, {"0": [1.0, 0.999]}, []),
            lambda: claims.step_time(TWO_RANKS, {}, {"0": [1.04, 1.0]}, []),
            lambda: claims.step_time(TWO_RANKS, {}, {"0": []}, []),
            lambda: claims.step_time(TWO_RANKS, {}, {}, ["10: refused"]),
            lambda: claims.step_time({}, {}, {}, []),
        ],
    ),
    "planning": (
        lambda: claims.planning({"llama": {"time_s": 9.9, "peak_gib": 0.6}, "gpt-1t": {"time_s": 60, "peak_gib": 2}}),
        [
            lambda: claims.planning({"llama": {"time_s": 10.1, "peak_gib": 0.5}}),
            lambda: claims.planning({"llama": {"time_s": 9.0, "peak_gib": 0.61}}),
            lambda: claims.planning({"gpt-1t": {"time_s": NAN, "peak_gib": 0.5}}),
            lambda: claims.planning({}),
        ],
    ),
    "large_runs": (
        lambda: claims.large_runs({str(run): (-0.1, 0.15) for run in range(9)}),
        [
            lambda: claims.large_runs({str(run): (0.11, 0.0) for run in range(9)}),
            lambda: claims.large_runs({str(run): (0.0, 0.16) for run in range(9)}),
            lambda: claims.large_runs({str(run): (NAN, NAN) for run in range(9)}),
            lambda: claims.large_runs({str(run): (0.0, 0.0) for run in range(8)}),
            lambda: claims.large_runs({}),
        ],
    ),
    "constants": (
        lambda: claims.constants(ERRORS, WITHOUT, ORIGINS),
        [
            lambda: claims.constants(ERRORS | {"one node": 0.07}, WITHOUT, ORIGINS),
            lambda: claims.constants(ERRORS | {"held out": 0.07}, WITHOUT, ORIGINS),
            lambda: claims.constants(ERRORS | {"22B to 1T": NAN}, WITHOUT, ORIGINS),
            lambda: claims.constants(ERRORS | {"T4 ranks": 0.94}, WITHOUT, ORIGINS),
            lambda: claims.constants(ERRORS | {"large": NAN}, WITHOUT, ORIGINS),
            lambda: claims.constants({}, WITHOUT, ORIGINS),
            lambda: claims.constants(ERRORS, WITHOUT | {"0": {"T4": NAN}}, ORIGINS),
            lambda: claims.constants(ERRORS, WITHOUT, ORIGINS | {"0": "a good guess"}),
            lambda: claims.constants(ERRORS, {}, ORIGINS),
        ],
    ),
    "accuracy": (
        lambda: claims.accuracy({"all": 0.06, "held out": 0.059}),
        [
            lambda: claims.accuracy({"all": 0.061, "held out": 0.059}),
            lambda: claims.accuracy({"all": 0.06, "held out": NAN}),
            lambda: claims.accuracy({}),
        ],
    ),
    "sharding_levels": (
        lambda: claims.sharding_levels({"8 devices": (1.0, 1.0)}),
        [
            lambda: claims.sharding_levels({"8 devices": (1.01, 1.0)}),
            lambda: claims.sharding_levels({"8 devices": (0.5, 0.99)}),
            lambda: claims.sharding_levels({"8 devices": (NAN, 1.0)}),
            lambda: claims.sharding_levels({}),
        ],
    ),
    "horovod": (
        lambda: claims.horovod({"weak": 0.04, "strong": -0.05}),
        [
            lambda: claims.horovod({"weak": 0.06, "strong": 0.0}),
            lambda: claims.horovod({"weak": 0.0, "strong": -0.06}),
            lambda: claims.horovod({"weak": NAN, "strong": 0.0}),
            lambda: claims.horovod({"weak": 0.0}),
        ],
    ),
    "twins": (
        lambda: claims.twins({str(i): i > 1 for i in range(30)}, True),
        [
            lambda: claims.twins({str(i): i > 2 for i in range(30)}, True),
            lambda: claims.twins({"gpt2": False}, False),
            lambda: claims.twins({}, False),
        ],
    ),
    "found_plans": (
        lambda: claims.found_plans({"4 ranks": FOUND}),
        [
            lambda: claims.found_plans({"4 ranks": FOUND | {"jax_losses": [7.0, 6.001]}}),
            lambda: claims.found_plans({"4 ranks": FOUND | {"torch_losses": [], "jax_losses": []}}),
            lambda: claims.found_plans({"4 ranks": FOUND | {"torch": [0.99]}}),
            lambda: claims.found_plans({"4 ranks": FOUND | {"jax": [NAN]}}),
            lambda: claims.found_plans({"4 ranks": FOUND | {"jax_compiled": []}}),
            lambda: claims.found_plans({}),
        ],
    ),
    "annealing": (
        lambda: claims.annealing(2, 0.0, {"pipeline": 0.005}),
        [
            lambda: claims.annealing(3, 0.0, {"pipeline": 0.005}),
            lambda: claims.annealing(2, NAN, {"pipeline": 0.005}),
            lambda: claims.annealing(2, 0.0, {"pipeline": 0.011}),
            lambda: claims.annealing(2, 0.0, {}),
        ],
    ),
}  # fmt: skip
