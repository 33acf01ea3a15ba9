"""Of the claims of what is held: predicted memory, offload and out of core."""

import claims

from tests.benchmarks.judged import NAN, Judged

ALONE = {"peak over budget": 0.9, "first losses apart": 0.0, "last loss over the first": 0.5, "last apart": 0.01}

JUDGED: Judged = {
    "memory_ranks": (
        lambda: claims.memory_ranks({"pp 2": [1.0, 1.03]}),
        [
            lambda: claims.memory_ranks({"pp 2": [1.0, 0.999]}),
            lambda: claims.memory_ranks({"pp 2": [1.04, 1.0]}),
            lambda: claims.memory_ranks({"pp 2": [1.0, NAN]}),
            lambda: claims.memory_ranks({"pp 2": []}),
            lambda: claims.memory_ranks({}),
        ],
    ),
    "gpu_offload": (
        lambda: claims.gpu_offload({"bf16": 1.05}, timed=True),
        [
            lambda: claims.gpu_offload({"bf16": 1.06}, timed=True),
            lambda: claims.gpu_offload({"bf16": NAN}, timed=True),
            lambda: claims.gpu_offload({"bf16": NAN}, timed=False),
            lambda: claims.gpu_offload({}, timed=False),
        ],
    ),
    "host_states": (
        lambda: claims.host_states(ALONE, {"dp 2, on the host": (0.5, 1e-7), "pp 2": (2.0, 1e-6)}),
        [
            lambda: claims.host_states(ALONE | {"peak over budget": 1.01}, {}),
            lambda: claims.host_states(ALONE | {"first losses apart": NAN}, {}),
            lambda: claims.host_states(ALONE | {"last loss over the first": 1.0}, {}),
            lambda: claims.host_states(ALONE, {"dp 2, on the host": (1.1, 1e-7)}),
            lambda: claims.host_states({}, {"pp 2": (1.0, 1e-3)}),
            lambda: claims.host_states({}, {}),
        ],
    ),
    "out_of_core": (
        lambda: claims.out_of_core({"VGG": (0.99, 0.0), "ResNet": (1.0, 1e-7)}, 2, ("U-Net", 1e-6)),
        [
            lambda: claims.out_of_core({"VGG": (NAN, 0.0)}, 1),
            lambda: claims.out_of_core({"VGG": (0.99, 0.0)}, 1, ("U-Net", 1e-3)),
            lambda: claims.out_of_core({"VGG": (0.99, 0.0)}, 1, ("U-Net", NAN)),
            lambda: claims.out_of_core({"VGG": (1.01, 0.0)}, 1),
            lambda: claims.out_of_core({"VGG": (0.99, 1e-3)}, 1),
            lambda: claims.out_of_core({"VGG": (0.99, NAN)}, 1),
            lambda: claims.out_of_core({"VGG": (0.99, 0.0)}, 2),
            lambda: claims.out_of_core({}, 0),
        ],
    ),
}  # fmt: skip
