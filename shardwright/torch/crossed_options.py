"""Options of an optimizer that come from the other framework, to the groups of one of torch's."""

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.core.checkpoint.options import RATE, OptionGroup, is_same, of_torch, said, said_alone, value_for

_BETAS = ("beta1", "beta2")


def take_options(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], told: Sequence[OptionGroup], steps: int | None
) -> str | None:
    """Give the groups of an optimizer the options that a checkpoint of the other framework tells, and return what the
    user must be told: those that it does not tell, those of a schedule, and those that torch has not.

    Args:
        names: of the parameters of each group.
        steps: the number of steps of the schedule of the learning rate there; None: it tells none.
    """
    kind, untold, notes = type(optimizer).__name__, list[OptionGroup](), list[str]()
    groups = [{**group, "params": list(held)} for group, held in zip(optimizer.param_groups, names, strict=True)]
    here = of_torch({"class": kind, "groups": groups}, _number)
    is_scheduled = any(RATE in group.scheduled for group in told)
    for group, own in zip(optimizer.param_groups, here, strict=True):
        left: dict[str, float | None] = {}
        for word, before in own.options.items():
            assert before is not None
            value = value_for(told, word, own.params)
            if value is None:
                left[word] = before
            elif is_same(value, before):
                continue
            elif word == RATE and "initial_lr" in group:
                notes.append(
                    f"a scheduler gives lr={before:.7g} here, and it was {value:.7g} there: bring the scheduler to "
                    f"where it was"
                )
            else:
                _set(group, word, value)
        if left:
            untold.append(OptionGroup(own.params, left))
    if untold:
        words = list(dict.fromkeys(word for group in untold for word in group.options))
        notes.insert(
            0,
            f"the checkpoint does not tell {', '.join(words)} (an optax chain tells its options only where "
            f"optax.inject_hyperparams makes it), which stay as {kind} has them here: {said(untold, words)}; give it "
            f"those of the run there, unless they are",
        )
    if steps and (is_scheduled or any(RATE in group.options for group in untold)):
        notes.append(
            f"a schedule of the learning rate there was at step {steps}: a scheduler of torch's goes on from there "
            f"after so many calls of scheduler.step()"
        )
    return "; ".join([*dict.fromkeys(notes), *said_alone(told, here)]) or None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | torch.Tensor) else None


def _set(group: dict[str, Any], word: str, value: float) -> None:
    if word in _BETAS:
        betas = list(group["betas"])
        betas[_BETAS.index(word)] = value
        group["betas"] = tuple(betas)
    elif isinstance(group[word], torch.Tensor):
        group[word].fill_(value)
    else:
        group[word] = value
