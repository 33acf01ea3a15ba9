"""Options of optimizers between the words of torch and those of optax, group by group."""

from typing import Any

import numpy as np

from shardwright.core.checkpoint.name_map import NameMap
from shardwright.core.checkpoint.options import ARGUMENTS, OptionGroup, said, said_alone, value_for
from shardwright.core.checkpoint.translated import COUNTS, OPTION, OPTIONS, ROLES, SCHEDULE, STEP, Translated
from tests.core.checkpoint.saved_arrays import SavedArrays

NAMES = NameMap.of(
    {"h.{layer}.weight[out, in]": "h.kernel[layer, in, out]", "{m...}.weight[out, in]": "{m...}.kernel[in, out]"}
)
BETAS = {"betas": (0.9, 0.99), "eps": 1e-6}


def of_torch(groups: list[dict[str, Any]], kind: str = "AdamW") -> Translated:
    """A run of PyTorch with AdamW, under the names of JAX."""
    names = [name for group in groups for name in group["params"]]
    arrays = {
        f"{part}/{name}": np.zeros((2, 3), np.float32) for name in names for part in ("model", "optimizer0/exp_avg")
    }
    content = {"user": None, "steps": 4, "ties": {}, "optimizers": [{"class": kind, "steps": 4, "groups": groups}]}
    return Translated(SavedArrays("torch", arrays, content), NAMES)


def of_jax(*schedules: str, **options: float) -> Translated:
    """A run of JAX with options among the states of its optimizer, under the names of torch. ``schedules``: the options
    that one gives."""
    moments, told = "inner_state.0.mu", {f"hyperparams.{name}": value for name, value in options.items()}
    counts = ["count", *(f"hyperparams_states.{name}.count" for name in schedules)]
    roles = {moments: "exp_avg"} | dict.fromkeys(counts, SCHEDULE) | dict.fromkeys(told, OPTION)
    arrays: dict[str, Any] = {f"optimizer0/{name}": np.array(value, np.float32) for name, value in told.items()}
    arrays |= {f"optimizer0/{name}": np.array(4, np.int32) for name in counts}
    arrays |= {label: np.zeros((3, 2), np.float32) for label in ("model/a.kernel", f"optimizer0/{moments}/a.kernel")}
    return Translated(SavedArrays("jax", arrays, {"user": None, "steps": 4, ROLES: roles}), NAMES)


def test_groups_of_parameters_keep_their_own_options() -> None:
    state = of_torch([
        {"params": ["a.weight"], "lr": 0.1, "weight_decay": 0.2, **BETAS},
        {"params": ["b.weight"], "lr": 0.1, "weight_decay": 0.0, "initial_lr": 0.5, **BETAS},
    ])  # fmt: skip
    assert [group.params for group in state.options] == [("a.kernel",), ("b.kernel",)]
    assert value_for(state.options, "weight_decay", ["a.kernel"]) == 0.2
    assert value_for(state.options, "weight_decay", ["b.kernel"]) == 0.0
    assert value_for(state.options, "weight_decay", ["a.kernel", "b.kernel"]) is None
    assert value_for(state.options, "lr", ["a.kernel", "b.kernel"]) == 0.1
    assert value_for(state.options, "lr", ["a.kernel", "of no group"]) is None
    assert value_for(state.options, "lr", []) is None
    assert (state.options[0].scheduled, state.options[1].scheduled) == ((), ("lr",))
    text = said(state.options, list(ARGUMENTS), ARGUMENTS)
    assert "learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-06, weight_decay=0.2 (a.kernel) or 0 (b.kernel)" in text


def test_tensors_of_unlike_options_that_become_one_have_none() -> None:
    state = of_torch([
        {"params": ["h.0.weight"], "lr": 0.1, "weight_decay": 0.2},
        {"params": ["h.1.weight"], "lr": 0.1, "weight_decay": 0.0},
    ])  # fmt: skip
    (group,) = state.options
    assert group.options == {"lr": 0.1, "weight_decay": None}
    assert "weight_decay=unlike values" in said(state.options, ["weight_decay"])


def test_what_the_other_framework_means_otherwise_is_named() -> None:
    """The decay of Adam and SGD joins the gradient, and optax.adamw's does not."""
    group = {
        "params": ["a.weight"],
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0.5,
        "weight_decay": 0.01,
        "maximize": True,
    }
    state = of_torch([group], "SGD")
    (found,) = state.options
    assert found.options == {"lr": 0.1, "momentum": 0.9}
    assert found.alone == {"maximize": True, "dampening": 0.5, "l2": 0.01}
    notes = said_alone(state.options)
    assert len(notes) == 3
    assert any("add_decayed_weights" in note for note in notes)
    assert said_alone(state.options, [OptionGroup((), {}, found.alone)]) == [], (
        "a run that has them too is told nothing"
    )


def test_options_of_an_optax_state_are_of_the_chain_inside_of_it() -> None:
    state = of_jax(learning_rate=0.25, b1=0.5, eps_root=0.125)
    (group,) = state.options
    assert group.params == ("a.weight",)
    assert group.options == {"lr": 0.25, "beta1": 0.5}
    assert group.scheduled == ()
    assert "eps_root=0.125 has no counterpart" in said_alone(state.options)[0]
    (group,) = of_jax("learning_rate", learning_rate=0.25).options
    assert group.scheduled == ("lr",)


def test_a_chain_that_tells_no_options_has_none() -> None:
    assert of_jax().options == []


def test_options_survive_a_second_translation() -> None:
    group = {"params": ["a.weight"], "lr": 0.1, "weight_decay": 0.2, **BETAS}
    there = of_torch([group])
    content = there.content(lambda name: None)
    assert content[COUNTS] == {STEP: None, SCHEDULE: 4}
    assert content[OPTIONS][0]["params"] == ["a.kernel"]
    kept = SavedArrays("jax", {"model/a.kernel": np.zeros((3, 2), np.float32)}, content)
    back = Translated(kept, NAMES)
    assert back.options[0].params == ("a.weight",)
    assert back.options[0].options == there.options[0].options
