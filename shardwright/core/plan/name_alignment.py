"""Whether a map of names agrees with how the plans of twins put their parameters beside each other."""

from collections.abc import Iterator

from shardwright.core.checkpoint.name_map import NameMap
from shardwright.core.errors import PlanError
from shardwright.core.model.structure import Binding
from shardwright.core.plan.plan import Plan


def unaligned_names(first: Plan, second: Plan, names: NameMap) -> Iterator[tuple[str, str, str]]:
    """The parameters that two plans of one structure have in the same place, and that a map does not relate: the place
    as ``unit/role``, the name in PyTorch and the name in JAX.

    Raises PlanError where the plans are not of one structure, or do not name the parts of both frameworks.
    """
    if (told := first.model.difference(second.model)) is not None:
        raise PlanError(f"names cannot be put beside each other: the models differ: {told}")
    bindings = dict(first.bindings) | dict(second.bindings)
    for framework in ("torch", "jax"):
        if framework not in bindings:
            raise PlanError(
                f"neither plan names the parts of the model in {framework} (they have {', '.join(bindings)}): "
                f"compare the plans of the twins"
            )
    torch, jax = bindings["torch"], bindings["jax"]
    aliases = {name: _aliases(torch, name) for unit in torch.units for _, name, _ in unit.parameters}
    for number, (one, other) in enumerate(zip(torch.units, jax.units, strict=True)):
        theirs = {role: name for role, name, _ in other.parameters}
        for role, name, _ in one.parameters:
            if not any(_relates(names, alias, theirs[role]) for alias in aliases[name]):
                yield f"{number}/{role}", name, theirs[role]


def _aliases(binding: Binding, name: str) -> tuple[str, ...]:
    """All names of a parameter."""
    return next((held for held in binding.aliases if name in held), (name,))


def _relates(names: NameMap, torch: str, jax: str) -> bool:
    found = names.relation(torch, "torch")
    if found is None:
        return False
    relation, values = found
    own = relation.jax.match(jax)
    return own is not None and all(own.get(axis, value) == value for axis, value in values.items())
