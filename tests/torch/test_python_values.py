"""Python values that a step or a model reads and that change between steps, or in them, as in the unsplit model."""

import gc
import time
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.backends.torch.program.python_places import MISSING, Entries
from shardwright.backends.torch.program.python_reads import referrers_of
from shardwright.backends.torch.program.step_recorder import record
from tests.torch.launch import Outcome, on_ranks, single

CASES = (
    "an_attribute", "a_text", "a_function", "a_nested_object", "a_replaced_object",
    "an_attribute_by_its_name_in_parts", "items_of_a_list", "an_attribute_of_a_class", "a_tensor_that_is_no_buffer",
    "a_buffer_in_place", "dropout", "a_global", "entries_of_a_dict", "a_property_and_a_method", "a_default",
    "the_environment", "arguments", "a_closure", "an_attribute_of_a_loss", "nothing",
)  # fmt: skip
"""Values that are changed from outside."""
WRITTEN = (
    "a_counter_in_forward", "an_average_in_forward", "a_flag_and_a_list_in_forward", "a_counter_in_the_step",
)  # fmt: skip
"""Values that the step writes itself."""
REFUSED = ("a_tensor_kept_in_forward", "changed_on_one_rank")
IMPURE = ("a_clock", "a_generator_of_the_users")
"""Calls that give another value each time."""
FEW = (
    "an_attribute", "an_attribute_of_a_class", "a_tensor_that_is_no_buffer", "a_buffer_in_place", "dropout", "a_global",
    "arguments", "a_closure", "nothing",
)  # fmt: skip
"""Those that are run where values are found as without the other axis, or where nothing is recorded."""
KINDS = {"one": (*FEW, *WRITTEN, *IMPURE), "pp": (*CASES, *WRITTEN, *REFUSED, *IMPURE),
         "tp": (*FEW, *WRITTEN, *REFUSED), "messages": (*FEW, *WRITTEN)}  # fmt: skip
REST = tuple(case for case in CASES if case not in FEW)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    script = "python_values.py"
    found = {"one": single(script, "one", *FEW, *WRITTEN), "pp": on_ranks(script, 2, "pp", timeout_s=300)}
    for kind in ("tp", "messages"):
        found[kind] = on_ranks(script, 2, kind, *FEW, *WRITTEN, timeout_s=300)
    return found


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in KINDS.items() for case in cases])
def test_a_value_is_as_in_the_unsplit_model(outcomes: dict[str, Outcome], kind: str, case: str) -> None:
    assert f"ok {case}" in outcomes[kind].text, outcomes[kind].text[-4000:]


@pytest.mark.slow
def test_every_value_is_as_in_the_unsplit_model_on_one_rank() -> None:
    outcome = single("python_values.py", "one", *REST)
    assert outcome.code == 0, outcome.text[-4000:]
    assert [case for case in REST if f"ok {case}" not in outcome.text] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_launch_ends_well(outcomes: dict[str, Outcome], kind: str) -> None:
    assert outcomes[kind].code == 0, outcomes[kind].text[-4000:]


class Maker(OrderedDict):
    """Makes an object of each entry that it is asked for, as the table of activations of `transformers` does."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()


def test_what_a_dict_makes_when_it_is_asked_is_not_made() -> None:
    made: list[int] = []
    table = Maker(one=lambda: made.append(1))
    holder = Entries(table, "table", attributes=False)
    kept = dict.__getitem__(table, "one")
    assert holder.before == {"one": kept}
    assert holder.value("one") is kept
    assert holder.value("two") is MISSING
    first, *_ = holder.fetcher(("one",))()
    assert first is kept
    assert not made
    assert Entries(MappingProxyType({"one": 1}), "class", attributes=True).value("one") == 1


class Collects(nn.Module):
    """Garbage is collected in its forward, as it may be anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        gc.collect()
        return self.second(x)


collections: list[float] = []
total_s = 0.0


def clock_of_the_collector(phase: str, _: object) -> None:
    global total_s
    total_s += 1.0
    collections.append(time.perf_counter())


def test_what_python_runs_as_it_collects_garbage_is_no_part_of_the_step() -> None:
    model, x = Collects(), torch.ones(2, 4)
    gc.callbacks.insert(0, clock_of_the_collector)
    try:
        program, _ = record(model, {}, torch.device("cpu"), lambda given: model(given[0]).sum(), [x], lambda _: None)
    finally:
        gc.callbacks.remove(clock_of_the_collector)
    assert len(collections) > 1
    assert not program.python.clocks
    assert not program.python.effects
    assert not any("total_s" in guard.keys for guard in program.python.guarded)


registered: set[type] = set()
counted: set[int] = set()


class Registers(nn.Module):
    """Registers the class of what it returns where a second registration would be an error, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if MappingProxyType not in registered:
            registered.add(MappingProxyType)
        counted.add(len(counted))
        return self.linear(x)


def test_classes_that_are_registered_stay_so_and_other_members_are_undone() -> None:
    registered.clear()
    counted.clear()
    model, x = Registers(), torch.ones(2, 4)
    program, _ = record(model, {}, torch.device("cpu"), lambda given: model(given[0]).sum(), [x], lambda _: None)
    assert registered == {MappingProxyType}
    assert not counted
    assert not any("registered" in effect.holder.label for effect in program.python.effects)
    assert any("counted" in effect.holder.label for effect in program.python.effects)


def test_functions_that_were_frozen_are_met_as_others_are() -> None:
    """`gc.freeze` hides objects from the collector, which is asked what a function belongs to."""

    def hidden() -> None: ...

    gc.freeze()  # as before every test, when `hidden` was not there yet
    assert hidden in referrers_of([hidden.__code__])
    assert gc.get_freeze_count() > 0
