"""Options of an optimizer that come from the other framework, to the leaves of an optax state that hold such."""

from collections.abc import Mapping, Sequence

from shardwright.backends.jax.training.saved_state import OPTIMIZER, SavedLeaf
from shardwright.core.checkpoint import options
from shardwright.core.checkpoint.options import ARGUMENTS, OPTAX, OptionGroup
from shardwright.core.checkpoint.translated import OPTION


def option_values(
    groups: Sequence[OptionGroup], leaves: Sequence[SavedLeaf], roles: Mapping[str, str]
) -> tuple[dict[str, float], str | None]:
    """The value for each leaf of `optax.inject_hyperparams` that the groups tell, by its label, and what the user must
    be told: the options that the chain was made with, and does not tell, and those that optax has not.

    roles: those of the state's leaves. An option that a schedule gives follows that schedule.
    """
    own = [leaf for leaf in leaves if leaf.part == OPTIMIZER]
    follows: dict[str, list[str]] = {"": list(dict.fromkeys(name for group in groups for name in group.params))}
    for leaf in own:
        if leaf.follows is not None:
            follows.setdefault(leaf.kind, []).append(leaf.follows)
    values: dict[str, float] = {}
    held: set[tuple[str, str]] = set()
    for leaf in own:
        prefix = options.above_options(leaf.name) if roles.get(leaf.kind) == OPTION else None
        word = None if prefix is None else OPTAX.get(options.argument_of(leaf.name))
        if prefix is None or word is None:
            continue
        names = options.governed(prefix, follows)
        value = options.value_for(groups, word, names)
        is_scheduled = any(options.is_schedule_of(one.name, leaf.name) for one in own)
        if value is not None and not is_scheduled:
            values[leaf.label] = value
        if value is not None or is_scheduled:
            held |= {(word, name) for name in names}
    lacking = _without(groups, held)
    said = options.said_alone(groups)
    if any(group.options for group in lacking):
        words = [word for word in ARGUMENTS if any(word in group.options for group in lacking)]
        said.insert(
            0,
            f"give the optimizer here {options.said(lacking, words, ARGUMENTS)}, as there, unless it has that already: "
            f"an optax chain tells its options only where optax.inject_hyperparams makes it",
        )
    return values, "; ".join(said) or None


def _without(groups: Sequence[OptionGroup], held: set[tuple[str, str]]) -> list[OptionGroup]:
    """The groups with the options alone that are not 0 and that no leaf holds for all of the parameters."""
    found = []
    for group in groups:
        kept = {
            word: value for word, value in group.options.items()
            if value != 0 and not all((word, name) in held for name in group.params)
        }  # fmt: skip
        found.append(OptionGroup(group.params, kept))
    return found
