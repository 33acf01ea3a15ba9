"""The options of optimizers that checkpoints tell, in words of both frameworks, and what a run must be given by hand.

torch's optimizers keep them in groups of parameters. An optax state has those alone that `optax.inject_hyperparams`
puts there, for the parameters of the chain inside of it; other chains do not tell with what they were made. An option
has torch's word, whichever framework it comes from.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.core.errors import few

RATE, DECAY = "lr", "weight_decay"
OPTAX: Mapping[str, str] = {
    "learning_rate": RATE, "b1": "beta1", "b2": "beta2", "eps": "eps", "momentum": "momentum", "weight_decay": DECAY,
}  # fmt: skip
"""The word for each argument of `optax.adamw` and `optax.sgd` that means what torch's does. The decay is AdamW's, which
the gradient has no part in."""
ARGUMENTS: Mapping[str, str] = {word: argument for argument, word in OPTAX.items()}
ALONE: Mapping[str, str] = {
    "maximize": "negate the loss in the other framework",
    "dampening": "optax.trace has none",
    "nesterov": "give optax.sgd nesterov=True",
    "l2": "torch adds it to the gradient: put optax.add_decayed_weights before the moments",
    "eps_root": "torch has no term inside of the root",
}
"""Options that one framework's optimizers have and the other's have not, or not as a number, and what to do."""
_INSIDE, _INNER, _SCHEDULED = "hyperparams.", "inner_state.", "hyperparams_states."
"""The fields of `optax.inject_hyperparams`: the options, what they are of, and the schedules of some of them."""


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The options of some parameters.

    Attributes:
        params: their names.
        options: what both frameworks have, by torch's words. None: tensors that become one differ in it.
        alone: what the other framework has not.
        scheduled: the options that a schedule gave.
    """

    params: tuple[str, ...]
    options: Mapping[str, float | None]
    alone: Mapping[str, Any] = field(default_factory=dict)
    scheduled: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """The group as a checkpoint has it."""
        return {
            "params": list(self.params), "options": dict(self.options), "alone": dict(self.alone),
            "scheduled": list(self.scheduled),
        }  # fmt: skip

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "OptionGroup":
        """The group that `values` gave."""
        return cls(tuple(values["params"]), values["options"], values["alone"], tuple(values["scheduled"]))


def of_torch(told: Mapping[str, Any], number: Callable[[Any], float | None]) -> list[OptionGroup]:
    """The options of a torch optimizer, as a checkpoint tells of it. ``number`` gives the value of one that may be a
    tensor; None: it is no number."""
    found = []
    for group in told.get("groups", ()):
        held = {word: group.get(word) for word in (RATE, "eps", "momentum")}
        held |= {f"beta{place + 1}": beta for place, beta in enumerate(group.get("betas") or ())}
        alone = {word: group[word] for word in ("maximize", "dampening", "nesterov") if group.get(word)}
        if is_decoupled(told["class"], group):
            held[DECAY] = group.get(DECAY)
        elif decay := number(group.get(DECAY)):
            alone["l2"] = decay
        options = {word: value for word, entry in held.items() if (value := number(entry)) is not None}
        scheduled = (RATE,) if "initial_lr" in group else ()
        found.append(OptionGroup(tuple(group["params"]), options, alone, scheduled))
    return found


def is_decoupled(kind: str, group: Mapping[str, Any]) -> bool:
    """Whether a torch optimizer of this class decays weights apart from the gradient."""
    return kind == "AdamW" or bool(group.get("decoupled_weight_decay"))


def of_optax(
    names: Collection[str], follows: Mapping[str, Collection[str]], number: Callable[[str], float | None]
) -> list[OptionGroup]:
    """The options that an optax state tells.

    Args:
        names: of the leaves that are options, as ``0.hyperparams.learning_rate``, and of the counts of their schedules.
        follows: the parameters that each kind of states follows, as ``0.inner_state.0.mu``; where none is inside of an
            `optax.inject_hyperparams`, the options are of all parameters, which are under an empty name.
        number: gives the value of a leaf; None: it is no number.
    """
    found = []
    for prefix in dict.fromkeys(above_options(name) for name in names):
        if prefix is None:
            continue
        options: dict[str, float | None] = {}
        alone: dict[str, Any] = {}
        for name in names:
            if above_options(name) != prefix:
                continue
            argument = argument_of(name)
            if (value := number(name)) is None:
                continue
            if (word := OPTAX.get(argument)) is not None:
                options[word] = value
            elif value:
                alone[argument] = value
        scheduled = tuple(
            word for argument, word in OPTAX.items()
            if any(is_schedule_of(name, f"{prefix}{_INSIDE}{argument}") for name in names)
        )  # fmt: skip
        found.append(OptionGroup(governed(prefix, follows), options, alone, scheduled))
    return found


def above_options(name: str) -> str | None:
    """What comes before the options in the name of one; None for another leaf."""
    if name.startswith(_INSIDE):
        return ""
    above, is_one, _ = name.partition(f".{_INSIDE}")
    return f"{above}." if is_one else None


def argument_of(name: str) -> str:
    """The argument of optax's function that the leaf of an option is."""
    return name.removeprefix(f"{above_options(name)}{_INSIDE}")


def is_schedule_of(name: str, option: str) -> bool:
    """Whether a leaf is of the schedule that gives an option."""
    return name.startswith(f"{above_options(option)}{_SCHEDULED}{argument_of(option)}.")


def governed(prefix: str, follows: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """The parameters that the options under a prefix are of; ``follows`` as in `of_optax`."""
    inside = [names for kind, names in follows.items() if kind.startswith(f"{prefix}{_INNER}")]
    return tuple(dict.fromkeys(name for names in inside or [follows.get("", ())] for name in names))


def renamed(groups: Sequence[OptionGroup], sources: Mapping[str, Collection[str]]) -> list[OptionGroup]:
    """The groups of the parameters that others become. ``sources``: the parameters that each is made of."""
    of = {name: group for group in groups for name in group.params}
    made: dict[str, tuple[list[str], OptionGroup]] = {}
    for target, names in sources.items():
        held = [of[name] for name in names if name in of]
        if not held:
            continue
        words = dict.fromkeys(word for group in held for word in group.options)
        options = {word: only(group.options.get(word) for group in held) for word in words}
        alone = {key: value for group in held for key, value in group.alone.items()}
        scheduled = tuple(dict.fromkeys(word for group in held for word in group.scheduled))
        group = OptionGroup((), options, alone, scheduled)
        made.setdefault(repr(group), ([], group))[0].append(target)
    return [OptionGroup(tuple(names), g.options, g.alone, g.scheduled) for names, g in made.values()]


def only(values: Iterable[float | None]) -> float | None:
    """The value that all have; None where they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def value_for(groups: Sequence[OptionGroup], word: str, names: Collection[str]) -> float | None:
    """The value of an option for some parameters; None where it is not told for all of them, or not the same."""
    of = {name: group.options.get(word) for group in groups for name in group.params}
    return only(of.get(name) for name in names) if names else None


def is_same(one: float, other: float) -> bool:
    """Whether two values are one in float32, as optax keeps them."""
    return bool(np.float32(one) == np.float32(other))


def said(groups: Sequence[OptionGroup], words: Collection[str], names: Mapping[str, str] | None = None) -> str:
    """These options in words, as arguments; one with several values says whose each is. ``names``: other words."""
    found = []
    for word in words:
        of_value: dict[float | None, list[str]] = {}
        for group in groups:
            if word in group.options:
                of_value.setdefault(group.options[word], []).extend(group.params)
        values = [
            (("unlike values" if value is None else f"{value:.7g}"), f" ({few(held)})" if len(of_value) > 1 else "")
            for value, held in of_value.items()
        ]
        if values:
            found.append(f"{(names or {}).get(word, word)}=" + " or ".join(map("".join, values)))
    return ", ".join(found)


def said_alone(groups: Sequence[OptionGroup], here: Sequence[OptionGroup] = ()) -> list[str]:
    """The options that the other framework has not, each with what to do; but those that the run ``here`` has too."""
    found: dict[str, str] = {}
    for group in groups:
        for word, value in group.alone.items():
            if any(own.alone.get(word) == value for own in here):
                continue
            found[f"{word}={value:.7g}" if isinstance(value, float) else f"{word}={value}"] = ALONE.get(
                word, "it is no option of the other framework's optimizers"
            )
    return [f"{option} has no counterpart: {fix}" for option, fix in found.items()]
