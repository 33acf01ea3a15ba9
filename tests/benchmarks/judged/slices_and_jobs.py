"""Of the claims of slices of a sequence, and many models on few devices."""

import claims

from tests.benchmarks.judged import NAN, Judged

LARGE_JOB = {"parameters": 6.25e9, "hidden": 0.98, "device": 0.97, "host": 0.3, "planning_s": 2.0}
JOBS_RUNTIME_JAX = {"jobs": 6, "makespan": 1.04, "own passes": 1.01, "budget": 0.9}
MEMORY = {"fullest": 1.02, "least": 1.0, "budget": 0.9}
JOBS = {
    "bound": {"lists": 5000, "worst": 1.0, "broken": 0},
    "optimum": {"sharded-lrtf worst": 1.25, "sharded-lrtf mean": 1.03, "fifo least": 1.0, "fifo worst": 1.9},
    "gain": {"a": -0.009},
    "pipelines": {"a": 1.0},
    "copies": {"a: hidden": 0.95, "a: loss": 0.02},
    "speed": {"a": 60.0, "a, MiB": 1024.0},
}

JUDGED: Judged = {
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
    "jobs_runtime_jax": (
        lambda: claims.jobs_runtime_jax(JOBS_RUNTIME_JAX),
        [
            lambda: claims.jobs_runtime_jax(JOBS_RUNTIME_JAX | {"jobs": 5}),
            lambda: claims.jobs_runtime_jax(JOBS_RUNTIME_JAX | {"makespan": 1.11}),
            lambda: claims.jobs_runtime_jax(JOBS_RUNTIME_JAX | {"makespan": 0.89}),
            lambda: claims.jobs_runtime_jax(JOBS_RUNTIME_JAX | {"makespan": NAN}),
            lambda: claims.jobs_runtime_jax(JOBS_RUNTIME_JAX | {"own passes": 1.11}),
            lambda: claims.jobs_runtime_jax(JOBS_RUNTIME_JAX | {"budget": 1.01}),
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
    "jobs_memory": (
        lambda: claims.jobs_memory(dict.fromkeys("abcd", MEMORY)),
        [
            lambda: claims.jobs_memory(dict.fromkeys("abc", MEMORY)),
            lambda: claims.jobs_memory(dict.fromkeys("abc", MEMORY) | {"d": MEMORY | {"fullest": 1.04}}),
            lambda: claims.jobs_memory(dict.fromkeys("abc", MEMORY) | {"d": MEMORY | {"least": 0.99}}),
            lambda: claims.jobs_memory(dict.fromkeys("abc", MEMORY) | {"d": MEMORY | {"least": NAN}}),
            lambda: claims.jobs_memory(dict.fromkeys("abc", MEMORY) | {"d": MEMORY | {"budget": 1.01}}),
        ],
    ),
    "jobs_runtime": (
        lambda: claims.jobs_runtime({"jobs": 10.0, "two stages, no microbatches": 14.0}, 10.5, 1.6),
        [
            lambda: claims.jobs_runtime({"jobs": 10.0, "two stages, no microbatches": 14.0}, 8.9, 1.6),
            lambda: claims.jobs_runtime({"jobs": 10.0, "two stages, no microbatches": 14.0}, NAN, 1.6),
            lambda: claims.jobs_runtime({"jobs": 10.0, "two stages, no microbatches": 13.0}, 10.0, 1.6),
            lambda: claims.jobs_runtime({"jobs": 10.0}, 10.0, 1.6),
            lambda: claims.jobs_runtime({}, 10.0, 1.6),
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
            lambda: claims.sliced_zoo({"a": {"sliced": True, "causal": True, "ran": "differs: a loss"}}, 0.5),
            lambda: claims.sliced_zoo({}, 0.5),
        ],
    ),
}  # fmt: skip
