"""torch.compile for the units of a rank's stages, each by itself."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardwright.backends.torch.memory.fp8_linear import hides_from_compiler
from shardwright.backends.torch.program.stage_map import StageMap, recomputed
from shardwright.backends.torch.program.stages import Division
from shardwright.core.errors import MissingCapabilityError

_INSTEAD = "set 'compile': False, or"


class Compiler:
    """A compiler of units, each when a step first calls it.

    Args:
        backend: a backend of torch.compile, such as "inductor".
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._compiled: dict[str, nn.Module] = {}

    def require(self, stage_map: StageMap, divisions: Sequence[Division]) -> None:
        """Raise MissingCapabilityError for settings that need code between the ops of units, which compiled units do
        not run."""
        if stage_map.schedule.slices > 1:
            raise MissingCapabilityError(
                f"the plan has {stage_map.schedule.slices} slices of each sequence, whose units run op by op: leave "
                f"out compile, or plan with slices=1"
            )
        if stage_map.schedule.splits_backward:
            raise MissingCapabilityError(
                f"{stage_map.schedule.name} runs weight gradients apart, and a compiled unit makes them with those of "
                f"its input: {_INSTEAD} choose a schedule with whole backward passes, such as 1f1b"
            )
        if recomputed(stage_map.policies):
            raise MissingCapabilityError(
                f"a compiled unit chooses itself what it keeps and what it computes again: {_INSTEAD} recompute='none'"
            )
        for step in divisions[0].program.steps:
            if step.path is not None and step.random:
                raise MissingCapabilityError(
                    f"{step.path!r} draws random numbers in {step.random[0][0]!r}, and a compiled unit cannot be "
                    f"seeded for each draw, so that masks would depend on the split: {_INSTEAD} set its dropout to 0"
                )

    def units(
        self, modules: Mapping[str, nn.Module], divisions: Sequence[Division], stages: Sequence[int]
    ) -> dict[str, nn.Module]:
        """The compiled units of these stages, by path. Raises MissingCapabilityError for products in fp8 that the
        compiler does not see."""
        for division in divisions:
            for stage in stages:
                for step in division.parts[stage].steps:
                    if step.path is not None and step.path not in self._compiled:
                        _require_seen(modules[step.path], step.path)
                        compiled = torch.compile(modules[step.path], backend=self.backend)
                        assert isinstance(compiled, nn.Module)
                        self._compiled[step.path] = compiled
        return dict(self._compiled)


def _require_seen(unit: nn.Module, path: str) -> None:
    for inner, module in unit.named_modules():
        if hides_from_compiler(module):
            raise MissingCapabilityError(
                f"{type(module).__name__} at {'.'.join(filter(None, (path, inner)))!r} is no nn.Linear, and a compiled "
                f"unit would compute its product in bf16, which the plan has in fp8: {_INSTEAD} make it an nn.Linear"
            )
