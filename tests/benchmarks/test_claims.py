"""Every benchmark behind a line of the table of claims can fail, and its command exists."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import claims
from claims import Claims

ROOT = Path(__file__).parents[2]
NAN = float("nan")
TABLE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").split("| claim | shown by |")[1].split("\n\n")[0]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("|---")]
COMMANDS = re.findall(r"`((?:python|pytest) [^`]+)`", TABLE)
BENCHMARKS = sorted({command.split()[1] for command in COMMANDS if command.startswith("python ")})
BEHIND_FIGURES = ("benchmarks/twins.py", "benchmarks/found_plans.py")
"""Whose figures the table links to."""

LARGE_JOB = {"parameters": 6.25e9, "hidden": 0.98, "device": 0.97, "host": 0.3, "planning_s": 2.0}
LAYERS = {"ours, 1f1b": 1.05, "ours, gpipe": 1.04, "ppermute": 1.0, "praxis": 0.99}
CLASS = {"class": "A", "equal": True, "split": 0.98, "reasons": []}
FOUND = {"torch_losses": [7.0, 6.0], "jax_losses": [7.0, 6.0], "torch": [1.01], "jax": [1.1], "jax_compiled": [1.0]}
WHOLE = {"time": 0.9, "sent": 1.0, "memory": 0.9}
BF16 = {"peer in float32": 1e-7, "apart": 1e-6, "ours": 1e-3, "fsdp2": 1e-3, "farther": 5e-5, "error": 1e-4}
GPU = {"overhead": 1.01, "compiled": 0.95, "hidden": {"shard 0": 1.0, "shard 3": 0.5}, "memory": {"fp32": [1.0, 1.03]}}
TWO_RANKS = {str(plan): 0.05 for plan in range(9)} | {"9": 0.1}
MODELS = {(f"a:{number}", case): "equal" for number in range(45) for case in ("pp 2", "tp 2")}
JOBS = {
    "bound": {"lists": 5000, "worst": 1.0, "broken": 0},
    "optimum": {"sharded-lrtf worst": 1.25, "sharded-lrtf mean": 1.03, "fifo least": 1.0, "fifo worst": 1.9},
    "gain": {"a": -0.009},
    "pipelines": {"a": 1.0},
    "copies": {"a: hidden": 0.95, "a: loss": 0.02},
    "speed": {"a": 60.0, "a, MiB": 1024.0},
}
ALONE = {"peak over budget": 0.9, "first losses apart": 0.0, "last loss over the first": 0.5, "last apart": 0.01}
EDITED = {"refused": 100, "rescored": 25, "commands": 31}
EDITS = {(name, framework): EDITED for name in "abcd" for framework in ("torch", "jax")}
ERRORS = {"one node": 0.064, "held out": 0.059, "22B to 1T": 0.01, "T4": 0.06, "T4 ranks": 0.97, "large": 0.04}
WITHOUT = {str(constant): ERRORS for constant in range(28)}
ORIGINS = dict.fromkeys(WITHOUT, "Fitted: on a table")
JUDGED: dict[str, tuple[Callable[[], Claims], list[Callable[[], Claims]]]] = {
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
    "jobs": (
        lambda: claims.jobs(JOBS),
        [
            lambda: claims.jobs({"bound": JOBS["bound"] | {"worst": 1.01}}),
            lambda: claims.jobs({"bound": JOBS["bound"] | {"worst": NAN}}),
            lambda: claims.jobs({"bound": JOBS["bound"] | {"lists": 4999}}),
            lambda: claims.jobs({"bound": JOBS["bound"] | {"broken": 1}}),
            lambda: claims.jobs({"optimum": JOBS["optimum"] | {"fifo least": 0.99}}),
            lambda: claims.jobs({"optimum": JOBS["optimum"] | {"sharded-lrtf worst": 1.3}}),
            lambda: claims.jobs({"optimum": JOBS["optimum"] | {"sharded-lrtf mean": NAN}}),
            lambda: claims.jobs({"gain": {"a": 0.0, "b": -0.011}}),
            lambda: claims.jobs({"gain": {"a": NAN}}),
            lambda: claims.jobs({"pipelines": {"a": 0.99}}),
            lambda: claims.jobs({"copies": {"a: hidden": 0.94}}),
            lambda: claims.jobs({"copies": {"a: loss": -0.03}}),
            lambda: claims.jobs({"speed": {"a": 61.0}}),
            lambda: claims.jobs({"speed": {"a, MiB": 1025.0}}),
            lambda: claims.jobs({}),
        ],
    ),
    "large_job": (
        lambda: claims.large_job(LARGE_JOB),
        [
            lambda: claims.large_job(LARGE_JOB | {"parameters": 5.9e9}),
            lambda: claims.large_job(LARGE_JOB | {"hidden": NAN}),
            lambda: claims.large_job(LARGE_JOB | {"device": 1.01}),
            lambda: claims.large_job(LARGE_JOB | {"host": 1.5}),
            lambda: claims.large_job(LARGE_JOB | {"planning_s": 61.0}),
        ],
    ),
    "slice_lengths": (
        lambda: claims.slice_lengths({"a": {"search": 0.3, "uniform": 0.9, "peer": 1.0}}),
        [
            lambda: claims.slice_lengths({"a": {"search": 11.0, "uniform": 0.9, "peer": None}}),
            lambda: claims.slice_lengths({"a": {"search": 0.3, "uniform": 1.1, "peer": None}}),
            lambda: claims.slice_lengths({"a": {"search": 0.3, "uniform": 0.9, "peer": 1.01}}),
            lambda: claims.slice_lengths({"a": {"search": 0.3, "uniform": NAN, "peer": 1.0}}),
            lambda: claims.slice_lengths({}),
        ],
    ),
    "token_slices": (
        lambda: claims.token_slices({"175B": 5.0, "13B": 1.4, "1B": 1.0}),
        (
            lambda: claims.token_slices({"175B": 3.0, "13B": 1.4, "1B": 1.0}),
            lambda: claims.token_slices({"175B": 7.0, "13B": 1.4, "1B": 1.0}),
            lambda: claims.token_slices({"175B": 5.0, "13B": 1.0, "1B": 1.0}),
            lambda: claims.token_slices({"175B": 5.0, "13B": 1.4, "1B": 1.1}),
            lambda: claims.token_slices({}),
        ),
    ),
    "sliced_steps": (
        lambda: claims.sliced_steps(
            {"whole": 1.4, "one slice": 1.4, "the planner's": 1.0, "1 + 1": 0.99}, {"whole": 1.3, "the planner's": 1.05}
        ),
        (
            lambda: claims.sliced_steps(
                {"whole": 1.2, "one slice": 1.2, "the planner's": 1.0, "1 + 1": 1.0},
                {"whole": 1.2, "the planner's": 1.0},
            ),
            lambda: claims.sliced_steps(
                {"whole": 1.4, "one slice": 1.4, "the planner's": 1.0, "1 + 1": 0.9},
                {"whole": 1.4, "the planner's": 1.0},
            ),
            lambda: claims.sliced_steps(
                {"whole": 1.4, "one slice": 1.5, "the planner's": 1.0, "1 + 1": 1.0},
                {"whole": 1.4, "the planner's": 1.0},
            ),
            lambda: claims.sliced_steps(
                {"whole": 1.4, "one slice": 1.4, "the planner's": 1.0, "1 + 1": 1.0},
                {"whole": 1.4, "the planner's": 1.2},
            ),
            lambda: claims.sliced_steps({}, {}),
        ),
    ),
    "sliced_memory": (
        lambda: claims.sliced_memory({"a": [1.0, 1.02]}, 0.3),
        (
            lambda: claims.sliced_memory({"a": [0.99, 1.02]}, 0.3),
            lambda: claims.sliced_memory({"a": [1.0, 1.05]}, 0.3),
            lambda: claims.sliced_memory({"a": [1.0]}, 0.7),
            lambda: claims.sliced_memory({}, 0.3),
        ),
    ),
    "sliced_zoo": (
        lambda: claims.sliced_zoo({"a": {"sliced": True, "causal": True}}, 0.5),
        [
            lambda: claims.sliced_zoo({"a": {"sliced": True, "causal": False}}, 0.5),
            lambda: claims.sliced_zoo({"a": {"sliced": False, "causal": True}}, 0.5),
            lambda: claims.sliced_zoo({}, 0.5),
        ],
    ),
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
    "mixed_clusters": (
        lambda: claims.mixed_clusters({"GPT": (1.0, [None, 1.0])}),
        [
            lambda: claims.mixed_clusters({"GPT": (1.0, [None, 0.99])}),
            lambda: claims.mixed_clusters({"GPT": (NAN, [1.0])}),
            lambda: claims.mixed_clusters({"GPT": (1.0, [None])}),
            lambda: claims.mixed_clusters({}),
        ],
    ),
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
    "few_microbatches": (
        lambda: claims.few_microbatches([0.0, 0.005], 2, 0.005),
        [
            lambda: claims.few_microbatches([0.0, 0.0051], 2, 0.005),
            lambda: claims.few_microbatches([0.0, NAN], 2, 0.005),
            lambda: claims.few_microbatches([0.0], 2, 0.005),
            lambda: claims.few_microbatches([], 0, 0.005),
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
    "background_saving": (
        lambda: claims.background_saving({"pp 2": 0.04}, {"pp 2": 1.0}),
        [
            lambda: claims.background_saving({"pp 2": 0.06}, {"pp 2": 1.0}),
            lambda: claims.background_saving({"pp 2": NAN}, {"pp 2": 1.0}),
            lambda: claims.background_saving({"pp 2": 0.01}, {"pp 2": 1.1}),
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
    "horovod": (
        lambda: claims.horovod({"weak": 0.04, "strong": -0.05}),
        [
            lambda: claims.horovod({"weak": 0.06, "strong": 0.0}),
            lambda: claims.horovod({"weak": 0.0, "strong": -0.06}),
            lambda: claims.horovod({"weak": NAN, "strong": 0.0}),
            lambda: claims.horovod({"weak": 0.0}),
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
    "adversaries": (
        lambda: claims.adversaries({"0": "", "1": ""}, 20.0, 2),
        [
            lambda: claims.adversaries({"0": "", "1": "it trained in silence"}, 20.0, 2),
            lambda: claims.adversaries({"0": ""}, 20.0, 2),
            lambda: claims.adversaries({"0": ""}, 71.0, 1),
            lambda: claims.adversaries({}, 0.0, 1),
        ],
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
    "annealing": (
        lambda: claims.annealing(2, 0.0, {"pipeline": 0.005}),
        [
            lambda: claims.annealing(3, 0.0, {"pipeline": 0.005}),
            lambda: claims.annealing(2, NAN, {"pipeline": 0.005}),
            lambda: claims.annealing(2, 0.0, {"pipeline": 0.011}),
            lambda: claims.annealing(2, 0.0, {}),
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


@pytest.mark.parametrize("name", JUDGED)
def test_figures_that_hold_end_well_and_others_do_not(name: str) -> None:
    good, bad = JUDGED[name]
    assert good().exit_code == 0, good().verdict()
    assert good().verdict().endswith(f"{len(good().rows)} of {len(good().rows)} figures hold.")
    assert bad
    for number, found in enumerate(bad):
        assert found().exit_code == 1, f"{number}: {found().verdict()}"
        assert "FAILS" in found().verdict() or not found().rows


def test_what_fails_is_named() -> None:
    found = claims.pipeline_fidelity({"gpt2, auto": 0.2, "t5, auto": 0.0})
    assert found.failed == ["gpt2, auto: error: 0.2, at most 0.05"]
    assert "1 of 2 figures hold." in found.verdict()


def test_every_line_of_the_table_has_a_command_or_figures() -> None:
    assert len(ROWS) > 15
    for row in ROWS:
        assert re.search(r"`(python|pytest) [^`]+`|\]\(benchmarks/results/", row.split("|")[-2]), row


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_table_exist(command: str) -> None:
    file = command.split()[1]
    assert (ROOT / file).exists(), command
    if file.endswith(".py") and file.startswith("tests"):
        assert "def test_" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [*BENCHMARKS, *BEHIND_FIGURES])
def test_a_benchmark_behind_a_claim_ends_with_the_verdict(file: str) -> None:
    """Its `main` judges by the function of its name, and what that returns is the exit code."""
    name = Path(file).stem
    assert name in JUDGED, f"no test says that {file} can fail"
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    called = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert any(call.startswith(f"claims.{name}(") for call in called), f"{file} does not judge what it measures"
    assert "sys.exit(main())" in called
    returned = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    assert any(text.endswith(".exit_code") for text in returned)


def test_every_judge_is_tested() -> None:
    judges: list[Any] = [name for name, value in vars(claims).items() if callable(value) and name.islower()]
    assert sorted(name for name in judges if name not in ("dataclass", "field")) == sorted(JUDGED)
