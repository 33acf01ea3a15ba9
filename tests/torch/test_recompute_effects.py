"""Recompute of units whose forward has effects: the second run finds what the first found, and leaves nothing."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.backends.torch.memory.module_attributes import Attributes
from shardwright.core.errors import MissingCapabilityError
from tests.comparison import Comparison
from tests.torch.launch import single
from tests.torch.workers.recompute_effects import KINDS, SCHEDULES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("effects") / "out.json"
    outcome = single("recompute_effects.py", str(out), timeout_s=180)
    assert outcome.code == 0, outcome.text[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_effects_are_those_of_one_run(results: dict[str, Any], kind: str, schedule: str) -> None:
    result = results[f"{kind}, {schedule}"]
    Comparison.of_ranks([result["same"]]).require("losses", "gradients")
    assert result["left"] == result["wanted"]
    assert all(left != result["fresh"] for left in result["left"]), "the effect is there"


class Written(nn.Module):
    """A module in a module, whose attributes are of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.number, self.inner.queue = 1, deque([1, 2], maxlen=3)
        self.names, self.sizes, self.same = {"a"}, {"a": [1]}, [1]
        self.table = torch.zeros(2)


def test_attributes_are_given_back_as_they_were() -> None:
    module = Written()
    before = Attributes(module)
    queue = module.inner.queue
    module.inner.number += 1
    module.inner.queue += [3, 4]
    module.names.add("b")
    module.sizes["b"] = [2]
    module.new = 5
    before.keep_written()
    written = {("inner", "number"), ("inner", "queue"), ("", "names"), ("", "sizes"), ("", "new")}
    assert set(before.places) == written
    now = Attributes(module, before.places)
    before.restore()
    assert (module.inner.number, list(module.inner.queue), module.names, module.sizes) == (1, [1, 2], {"a"}, {"a": [1]})
    assert not hasattr(module, "new")
    assert module.inner.queue is queue
    now.restore()
    assert (module.inner.number, list(module.inner.queue), module.names, module.new) == (2, [2, 3, 4], {"a", "b"}, 5)


def test_a_tensor_that_is_written_in_place_is_refused_by_name() -> None:
    module = Written()
    before = Attributes(module)
    module.table.add_(1.0)
    with pytest.raises(MissingCapabilityError, match=r"writes in place to table, a tensor .* register_buffer\('table'"):
        before.keep_written()
