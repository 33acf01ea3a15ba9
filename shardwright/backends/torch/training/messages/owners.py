"""The owner of each module: the rank of the pipeline that runs it, and holds the tensors that it uses directly."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shardwright.backends.torch.state.ownership import Placement, buffer_names, extra_state_paths, parameter_names
from shardwright.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Owners:
    """The pp coordinate that owns each module, by its first path; that of the root runs the step body.

    Raises PlanError unless every module of the model has an owner.
    """

    of_path: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module, given: Mapping[str, int]) -> "Owners":
        """The owners of all modules. A module that ``given`` does not name belongs to the owner of the module around
        it; the root to 0."""
        known = {path for path, _ in model.named_modules(remove_duplicate=False)}
        missing = sorted(set(given) - known)
        if missing:
            raise PlanError(f"the plan gives {missing[0]!r} to a rank, and the model has no such module: plan it anew")
        found: dict[str, int] = {}
        for path, _ in model.named_modules():
            around = path
            while around not in given and around:
                around = around.rpartition(".")[0]
            found[path] = given.get(around, 0)
        found[""] = 0
        return cls(found)

    def placement(self, model: nn.Module) -> Placement:
        """The placement of the parameters and buffers: on the owners of the modules that have them, under any of their
        names."""
        first_path = {id(module): path for path, module in model.named_modules()}
        modules = dict(model.named_modules(remove_duplicate=False))

        def holders(names: tuple[str, ...]) -> tuple[int, ...]:
            owners = (self.of_path[first_path[id(modules[name.rpartition(".")[0]])]] for name in names)
            return tuple(dict.fromkeys(owners))

        return Placement(
            {name: holders(names) for name, names in parameter_names(model).items()},
            {name: holders(names) for name, names in buffer_names(model).items()},
            {path: (self.of_path[path],) for path in extra_state_paths(model)},
        )
