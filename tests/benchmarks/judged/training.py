"""Of the claims of what steps of split models do: that they end as steps of the unsplit model, and how fast."""

import claims

from tests.benchmarks.judged import NAN, Judged

LAYERS = {"ours, 1f1b": 1.05, "ours, gpipe": 1.04, "ppermute": 1.0, "praxis": 0.99}
CLASS = {"class": "A", "equal": True, "split": 0.98, "reasons": []}
WHOLE = {"time": 0.9, "sent": 1.0, "memory": 0.9}
BF16 = {"peer in float32": 1e-7, "apart": 1e-6, "ours": 1e-3, "fsdp2": 1e-3, "farther": 5e-5, "error": 1e-4}
GPU = {"overhead": 1.01, "compiled": 0.95, "hidden": {"shard 0": 1.0, "shard 3": 0.5}, "memory": {"fp32": [1.0, 1.03]}}
MODELS = {(f"a:{number}", case): "equal" for number in range(45) for case in ("pp 2", "tp 2")}

JUDGED: Judged = {
    "pipeline_speed": (
        lambda: claims.pipeline_speed({"8:large": {"bound": 1.03, "torch": 0.98}}),
        [
            lambda: claims.pipeline_speed({"8:large": {"bound": 1.04, "torch": 0.98}}),
            lambda: claims.pipeline_speed({"8:large": {"bound": 1.01, "torch": 1.01}}),
            lambda: claims.pipeline_speed({"8:large": {"bound": NAN, "torch": 0.98}}),
            lambda: claims.pipeline_speed({"a": {"bound": 1.0, "torch": 0.9}, "b": {"bound": 1.2, "torch": 0.9}}),
            lambda: claims.pipeline_speed({}),
        ],
    ),
    "real_models": (
        lambda: claims.real_models(MODELS | {("a:0", "pp 2"): "refused", ("a:1", "tp 2"): "equal, by messages"}, True),
        [
            lambda: claims.real_models(MODELS | {("a:0", "pp 2"): "WRONG"}, True),
            lambda: claims.real_models(MODELS | {("a:0", "tp 2"): "failed"}, True),
            lambda: claims.real_models(MODELS | {(f"a:{n}", "tp 2"): "refused" for n in range(5)}, True),
            lambda: claims.real_models(MODELS | {("a:0", "pp 2"): "not here"}, True),
            lambda: claims.real_models({("a:0", "pp 2"): "not here"}, False),
            lambda: claims.real_models({}, False),
        ],
    ),
    "real_models_jax": (
        lambda: claims.real_models_jax(MODELS, True),
        [
            lambda: claims.real_models_jax(MODELS | {("a:0", "pp 2"): "WRONG"}, True),
            lambda: claims.real_models_jax(dict(list(MODELS.items())[:28]), True),
            lambda: claims.real_models_jax({}, False),
        ],
    ),
    "data_parallel": (
        lambda: claims.data_parallel({("gpt", 0): WHOLE, ("ncf", 3): WHOLE | {"time": 1.0}}, timed=True),
        [
            lambda: claims.data_parallel({("gpt", 0): WHOLE | {"time": 0.96}}, timed=True),
            lambda: claims.data_parallel({("gpt", 0): WHOLE | {"sent": 0.98}}, timed=False),
            lambda: claims.data_parallel({("gpt", 0): WHOLE | {"memory": NAN}}, timed=False),
            lambda: claims.data_parallel({("bert", 3): WHOLE | {"time": 1.01}}, timed=True),
            lambda: claims.data_parallel({}, timed=True),
        ],
    ),
    "pipeline_fidelity": (
        lambda: claims.pipeline_fidelity({"gpt2": -0.05}),
        [
            lambda: claims.pipeline_fidelity({"gpt2": -0.06}),
            lambda: claims.pipeline_fidelity({"gpt2": 0.0, "t5": NAN}),
            lambda: claims.pipeline_fidelity({}),
        ],
    ),
    "jax_pipeline": (
        lambda: claims.jax_pipeline({"5 ms": LAYERS}),
        [
            lambda: claims.jax_pipeline({"5 ms": LAYERS | {"ours, 1f1b": 1.01}}),
            lambda: claims.jax_pipeline({"5 ms": LAYERS | {"ours, gpipe": NAN}}),
            lambda: claims.jax_pipeline({"5 ms": LAYERS | {"praxis": 1.06}}),
            lambda: claims.jax_pipeline({"5 ms": {"ppermute": 1.0, "praxis": 1.0}}),
            lambda: claims.jax_pipeline({}),
        ],
    ),
    "jax_first_step": (
        lambda: claims.jax_first_step({2: 1.09, 4: 1.3}, []),
        [
            lambda: claims.jax_first_step({2: 1.11, 4: 1.3}, []),
            lambda: claims.jax_first_step({2: 1.0, 4: 1.33}, []),
            lambda: claims.jax_first_step({2: NAN}, []),
            lambda: claims.jax_first_step({2: 1.0}, ["2 stages: 1 for 2"]),
        ],
    ),
    "tensor_parallel": (
        lambda: claims.tensor_parallel(1.05),
        [lambda: claims.tensor_parallel(1.06), lambda: claims.tensor_parallel(NAN)],
    ),
    "jax_tensor_parallel": (
        lambda: claims.jax_tensor_parallel(1.02),
        [lambda: claims.jax_tensor_parallel(1.03), lambda: claims.jax_tensor_parallel(NAN)],
    ),
    "tensor_parallel_zoo": (
        lambda: claims.tensor_parallel_zoo([CLASS], ["A"], False),
        [
            lambda: claims.tensor_parallel_zoo([CLASS | {"equal": False}], ["A"], False),
            lambda: claims.tensor_parallel_zoo([CLASS], ["A", "B"], False),
            lambda: claims.tensor_parallel_zoo([CLASS | {"split": 0.1}], ["A"], False),
            lambda: claims.tensor_parallel_zoo([CLASS], ["A"], True),
            lambda: claims.tensor_parallel_zoo([CLASS | {"split": 0.96}] * 44, ["A"] * 44, True),
            lambda: claims.tensor_parallel_zoo([], [], False),
        ],
    ),
    "sharded_zoo": (
        lambda: claims.sharded_zoo([CLASS], ["A"], False),
        [
            lambda: claims.sharded_zoo([CLASS | {"equal": False}], ["A"], False),
            lambda: claims.sharded_zoo([CLASS], ["A", "B"], False),
            lambda: claims.sharded_zoo([CLASS], ["A"], True),
            lambda: claims.sharded_zoo([], [], False),
        ],
    ),
    "never_whole": (
        lambda: claims.never_whole(14.0, 110.0, 100.0, 10.0),
        [
            lambda: claims.never_whole(16.0, 110.0, 100.0, 10.0),
            lambda: claims.never_whole(14.0, 111.0, 100.0, 10.0),
            lambda: claims.never_whole(NAN, 110.0, 100.0, 10.0),
        ],
    ),
    "zoo": (
        lambda: claims.zoo({2: {"A": True}, 4: {"A": True}}, False),
        [
            lambda: claims.zoo({2: {"A": True}, 4: {"A": False}}, False),
            lambda: claims.zoo({2: {"A": True}, 4: {}}, False),
            lambda: claims.zoo({2: {str(i): i > 1 for i in range(431)}}, True),
            lambda: claims.zoo({2: {str(i): True for i in range(430)}}, True),
            lambda: claims.zoo({}, False),
        ],
    ),
    "bf16_losses": (
        lambda: claims.bf16_losses({"gpt2": BF16}),
        [
            lambda: claims.bf16_losses({"gpt2": BF16 | {"peer in float32": 2e-5}}),
            lambda: claims.bf16_losses({"gpt2": BF16 | {"apart": 0.004}}),
            lambda: claims.bf16_losses({"gpt2": BF16 | {"farther": 1.2e-4}}),
            lambda: claims.bf16_losses({"gpt2": BF16 | {"error": NAN}}),
            lambda: claims.bf16_losses({"gpt2": BF16, "bert": BF16 | {"apart": NAN}}),
            lambda: claims.bf16_losses({}),
        ],
    ),
    "gpu": (
        lambda: claims.gpu({1: GPU | {"memory": {"fp32": [1.02]}}, 2: GPU}, timed=True),
        [
            lambda: claims.gpu({2: GPU | {"overhead": 1.02}}, timed=True),
            lambda: claims.gpu({2: GPU | {"overhead": NAN}}, timed=False),
            lambda: claims.gpu({2: GPU | {"compiled": 0.94}}, timed=True),
            lambda: claims.gpu({2: dict.fromkeys(GPU)}, timed=True),
            lambda: claims.gpu({2: GPU | {"hidden": {"shard 0": 0.9}}}, timed=True),
            lambda: claims.gpu({2: GPU | {"memory": {"fp32": [1.0]}}}, timed=True),
            lambda: claims.gpu({2: GPU | {"memory": {"fp32": [1.0, 0.99]}}}, timed=False),
            lambda: claims.gpu({2: GPU | {"memory": {"fp32": [1.0, 1.04]}}}, timed=True),
            lambda: claims.gpu({2: GPU | {"memory": {"fp32": [1.0, 1.3]}}}, timed=False),
            lambda: claims.gpu({2: GPU | {"memory": {}}}, timed=True),
            lambda: claims.gpu({}, timed=True),
        ],
    ),
    "gpu_steps": (
        lambda: claims.gpu_steps({"gpt2": {"shipped": 0.91, "here": 1.04, "memory": 1.02}}, [], timed=True),
        [
            lambda: claims.gpu_steps({"gpt2": {"shipped": 0.89, "here": 1.0, "memory": 1.0}}, [], timed=True),
            lambda: claims.gpu_steps({"gpt2": {"shipped": 1.0, "here": 0.94, "memory": 1.0}}, [], timed=True),
            lambda: claims.gpu_steps({"gpt2": {"shipped": 1.0, "here": 1.0, "memory": 0.999}}, [], timed=True),
            lambda: claims.gpu_steps({"gpt2": {"shipped": 1.0, "here": 1.0, "memory": 1.04}}, [], timed=True),
            lambda: claims.gpu_steps({"gpt2": {"shipped": NAN, "here": 1.0, "memory": 1.0}}, [], timed=False),
            lambda: claims.gpu_steps({}, ["gpt2"], timed=False),
            lambda: claims.gpu_steps({}, [], timed=True),
        ],
    ),
    "loading": (
        lambda: claims.loading({"pp 4": (0.9, True), "tp 4": (0.1, True)}, {"DCP": 1.29}),
        [
            lambda: claims.loading({"pp 4": (1.01, True)}, {}),
            lambda: claims.loading({"pp 4": (NAN, True)}, {}),
            lambda: claims.loading({"pp 4": (0.5, False)}, {"DCP": 1.0}),
            lambda: claims.loading({}, {"Orbax": 1.31}),
            lambda: claims.loading({}, {}),
        ],
    ),
    "loading_jax": (
        lambda: claims.loading_jax(1.29),
        [lambda: claims.loading_jax(1.31), lambda: claims.loading_jax(NAN)],
    ),
    "recording_time": (
        lambda: claims.recording_time({"gpt2 on 1": {"new_s": 0.2, "missed": 0}}),
        [
            lambda: claims.recording_time({"gpt2 on 1": {"new_s": 0.31, "missed": 0}}),
            lambda: claims.recording_time({"gpt2 on 1": {"new_s": NAN, "missed": 0}}),
            lambda: claims.recording_time({"gpt2 on 1": {"new_s": 0.2, "missed": 1}}),
            lambda: claims.recording_time({}),
        ],
    ),
}  # fmt: skip
