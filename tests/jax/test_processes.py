"""Pipelines of stages that are unlike each other over several processes: as one process trains them, and as the plain
model does."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.comparison import Comparison
from tests.jax import chains
from tests.jax.launch import on_processes
from tests.jax.process_training import MODELS, Case, Result, optimizer, run

pytestmark = pytest.mark.usefixtures("quick_compilation")

TWO = [
    Case("chain", 2, 2, shard=3, spans=True),
    Case("overflow", 2, 2, shard=2, precision="fp16", spans=True),
]
TWO_SLOW = [
    Case("dropout", 2, 2, schedule="interleaved-1f1b", virtual_stages=2),
    Case("infinite", 2, 2, nonfinite="error", steps=2),  # several processes look at a step one call later than one
    Case("gpt2", 2, 2, steps=20),
    Case("t5", 2, 2, schedule="zb-h1"),
    Case("metrics", 2, 2, init=True),
    Case("gpt2", 2, 2, schedule="zb-h1"),
    Case("t5", 2, 2, steps=20),
    Case("gpt2", 4, schedule="1f1b"),
    Case("t5", 4, schedule="zb-h1"),
    Case("resnet", 2, 2),
    Case("chain", 2, tp=2, spans=True),
    Case("chain", 2, 2, shard=1),
    Case("chain", 2, 2, shard=2, schedule="zb-h1"),
    Case("chain", 2, 2, schedule="gpipe", recompute="full"),
    Case("chain", 2, 2, schedule="zbv", virtual_stages=2),
    Case("chain", 2, 2, precision="bf16"),
    *(Case("chain", 2, 2, shard=shard, precision="bf16", spans=True) for shard in (1, 2, 3)),
    Case("gpt2", 2, 2, shard=2, precision="fp8", schedule="zb-h1"),
    Case("gpt2", 2, 2, shard=3, precision="fp8", spans=True),
    Case("overflow", 2, 2, precision="fp16"),
    Case("overflow", 2, 2, shard=1, precision="fp16", schedule="zb-h1"),
    Case("overflow", 2, 2, shard=3, precision="fp16", spans=True),
]
WIDE_SLOW = [
    *(Case("chain", 2, 4, shard=shard, shard_group=2) for shard in (1, 2)),
    Case("chain", 2, 4, shard=3, shard_group=2, spans=True),
    Case("overflow", 2, 4, shard=3, shard_group=2, precision="fp16", spans=True),
]
FOUR = [Case("chain", 4)]  # whose first value goes to every stage, as in T5
FOUR_SLOW = [
    Case("gpt2", 4, schedule="zb-h1"),
    Case("gpt2", 4),
    Case("t5", 4),
    Case("t5", 4, schedule="zb-h1"),
    Case("gpt2", 2, 2, schedule="zb-h1"),
    Case("chain", 2, 2, shard=3),
]

COLLECTIVES = [Case("chain", 2, 2, schedule="zb-h1")]
COLLECTIVES_SLOW = [
    Case("chain", 2, 2),
    Case("chain", 4, schedule="zb-h1"),
    Case("gpt2", 2, 2),
    Case("t5", 2, 2, schedule="zb-h1"),
    Case("t5", 4, schedule="zb-h1"),
    Case("dropout", 2, 2, schedule="interleaved-1f1b", virtual_stages=2),
    Case("metrics", 2, 2, init=True),
    Case("infinite", 2, 2, nonfinite="error", steps=2),
    Case("chain", 2, 2, shard=3),
    Case("overflow", 2, 2, shard=2, precision="fp16"),
]
FOUR_COLLECTIVES = [Case("gpt2", 4, schedule="zb-h1"), *FOUR]


def of_processes(
    cases: list[Case], processes: int, devices: int, folder: Path, begun_by: str = "sw"
) -> dict[str, list[Result]]:
    """What each process of a run found, by the name of the case. begun_by: "sw" or "jax"."""
    given = folder / "cases.json"
    given.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
    threads = devices + 2 if begun_by == "sw" else devices  # stages of several processes ask for more
    after = [str(folder), begun_by]
    on_processes("tests.jax.process_training", processes, devices, [str(given)], after, threads)
    return {case.name: [_read(folder / f"{case.name}.{rank}.npz") for rank in range(processes)] for case in cases}


def _read(path: Path) -> Result:
    with np.load(path) as held:
        found = Result(held["losses"].tolist(), held["norms"].tolist(), said=str(held["said"]))
        found.params = {name[2:]: held[name] for name in held.files if name.startswith("p:")}
        numbers = sorted({int(name.split(":")[1]) for name in held.files if name.startswith("a:")})
        found.aux = [
            {name.split(":")[2]: held[name] for name in held.files if name.startswith(f"a:{n}:")} for n in numbers
        ]
    return found


def require_as_one_process(case: Case, found: list[Result]) -> None:
    devices = jax.devices()[: case.pp * case.dp * case.tp]
    alone = run(case, devices)
    for own in found:
        compared = Comparison(case.name).values(own.losses, alone.losses, relative=1e-6, absolute=0.0, what="losses")
        compared.values(own.norms, alone.norms, relative=1e-5, absolute=0.0, what="norms")
        compared.values(own.params, alone.params, relative=1e-5, absolute=1e-7, what="params").require()
        assert len(own.aux) == len(alone.aux)
        if alone.aux:
            Comparison(case.name).values(own.aux, alone.aux, relative=1e-5, absolute=1e-7).require()
        assert own.said == alone.said
    if case.model == "overflow":
        assert [bool(each["skipped"]) for each in alone.aux] == [False, True, False]
    if case.model in ("gpt2", "t5", "chain") and case.precision == "fp32":
        create, loss, batches = MODELS[case.model]
        plain = chains.module_reference(loss, create, optimizer(), batches(case.steps))
        Comparison(case.name).losses(alone.losses, plain.losses, moving=1e-4).require()
        params = {name: found[0].params[name] for name in plain.params}
        # The gradient of a key's bias is rounding alone, and AdamW takes a step of it every time.
        Comparison(case.name).values(params, plain.params, relative=2e-3, absolute=1e-5 * case.steps).require()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    return of_processes(TWO, 2, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def two_slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    return of_processes(TWO_SLOW, 2, 2, tmp_path_factory.mktemp("two_slow"))


@pytest.fixture(scope="module")
def wide_slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    return of_processes(WIDE_SLOW, 2, 4, tmp_path_factory.mktemp("wide_slow"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    return of_processes(FOUR, 4, 1, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def four_slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    return of_processes(FOUR_SLOW, 4, 1, tmp_path_factory.mktemp("four_slow"))


@pytest.fixture(scope="module")
def by_collectives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    return of_processes(COLLECTIVES, 2, 2, tmp_path_factory.mktemp("collectives"), begun_by="jax")


@pytest.fixture(scope="module")
def by_collectives_slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    return of_processes(COLLECTIVES_SLOW, 2, 2, tmp_path_factory.mktemp("collectives_slow"), begun_by="jax")


@pytest.fixture(scope="module")
def four_by_collectives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    return of_processes(FOUR_COLLECTIVES, 4, 1, tmp_path_factory.mktemp("four_collectives"), begun_by="jax")


def _names(cases: list[Case]) -> dict[str, Any]:
    return {"argvalues": cases, "ids": [case.name for case in cases]}


@pytest.mark.parametrize("case", **_names(TWO))
def test_two_processes_of_two_devices(case: Case, two: dict[str, list[Result]]) -> None:
    require_as_one_process(case, two[case.name])
    if case.model == "infinite":
        for own in two[case.name]:
            assert own.said.startswith("NonFiniteError: step 1: the loss of microbatch "), own.said


@pytest.mark.slow
@pytest.mark.parametrize("case", **_names(TWO_SLOW))
def test_more_over_two_processes(case: Case, two_slow: dict[str, list[Result]]) -> None:
    require_as_one_process(case, two_slow[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", **_names(WIDE_SLOW))
def test_two_processes_of_four_devices(case: Case, wide_slow: dict[str, list[Result]]) -> None:
    require_as_one_process(case, wide_slow[case.name])


@pytest.mark.parametrize("case", **_names(FOUR))
def test_four_processes_of_one_device(case: Case, four: dict[str, list[Result]]) -> None:
    require_as_one_process(case, four[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", **_names(FOUR_SLOW))
def test_more_over_four_processes(case: Case, four_slow: dict[str, list[Result]]) -> None:
    require_as_one_process(case, four_slow[case.name])


@pytest.mark.parametrize("case", **_names(COLLECTIVES))
def test_processes_without_a_socket(case: Case, by_collectives: dict[str, list[Result]]) -> None:
    require_as_one_process(case, by_collectives[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", **_names(COLLECTIVES_SLOW))
def test_more_without_a_socket(case: Case, by_collectives_slow: dict[str, list[Result]]) -> None:
    require_as_one_process(case, by_collectives_slow[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", **_names(FOUR_COLLECTIVES))
def test_four_processes_without_a_socket(case: Case, four_by_collectives: dict[str, list[Result]]) -> None:
    require_as_one_process(case, four_by_collectives[case.name])
