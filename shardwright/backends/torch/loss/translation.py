"""Two traces of a step body as one loss program: the effect of each op on sums over samples
(`core.model.loss.program`)."""

import torch

from shardwright.backends.torch.capture.recorder import Recorded
from shardwright.backends.torch.loss.op_rules import RULES, translated
from shardwright.backends.torch.loss.trace import LossTrace
from shardwright.backends.torch.loss.trace_pairs import DifferentRunsError, require_alike
from shardwright.backends.torch.loss.traced_op import Counted, TracedOp, TracedValues
from shardwright.core.model.graph import FLOATING
from shardwright.core.model.loss import LossOp, LossProgram, Source
from shardwright.core.rules.op_rules import meet


class Translation:
    """The loss program of two traces, a small one and a large one.

    Attributes:
        program: on the values of the small trace by their numbers, and some values that no op of torch makes.
    """

    def __init__(self, small: LossTrace, large: LossTrace, sizes: tuple[int, int], norms_are_plain: bool) -> None:
        """``norms_are_plain``: batch norm is taken as if it worked on samples one by one.

        Raises DifferentRunsError.
        """
        self.sizes, self.norms_are_plain = sizes, norms_are_plain
        require_alike(small, large)
        self.values = TracedValues(small, large)
        self.sources = {number: Source("samples") for number in small.inputs}
        self.sources |= {number: Source("trained") for number in small.trained}
        self._note_constants()
        self.ops: list[LossOp] = []
        for index, (a, b) in enumerate(zip(small.ops, large.ops, strict=True)):
            self._translate(index, a, b)
        self.program = LossProgram(sizes, self.values.shapes, self.sources, tuple(self.ops))

    @property
    def counted(self) -> dict[int, Counted]:
        """The values that are counts of `nll_loss`."""
        return self.values.counted

    def _note_constants(self) -> None:
        small, large = self.values.traces
        for number, entries in small.constants.items():
            other = large.constants[number]
            if number in small.drawn_on_host and number in large.drawn_on_host:
                self.sources.setdefault(number, Source("samples"))
                continue
            if entries is not None and other is not None and len(entries) == len(other) == 1:
                self.sources.setdefault(number, Source("fixed", (entries[0], other[0])))
            elif (entries != other and len(entries or ()) == len(other or ())) or self._differs_outside(number):
                raise DifferentRunsError(
                    f"a tensor that the step makes of numbers is {entries} at batch {self.sizes[0]} and {other} at "
                    f"batch {self.sizes[1]}"
                )

    def _differs_outside(self, number: int) -> bool:
        """Whether a tensor from outside of the step, of many entries, has other entries at the other batch size."""
        one, other = (trace.outside.get(number) for trace in self.values.traces)
        if one is None or other is None or one is other or one.shape != other.shape:
            return False
        return one.dtype != other.dtype or not torch.equal(one, other)

    def _translate(self, index: int, a: Recorded, b: Recorded) -> None:
        name, _, piece = a.name.removeprefix("aten.").partition("/")
        if name not in RULES and name.endswith("_"):
            name = name[:-1]
        made = (self.values.traces[0].calls_of.get(index), self.values.traces[1].calls_of.get(index))
        small = self.values.traces[0]
        differentiable = index not in small.without_gradient and any(
            small.values[n].dtype in FLOATING or small.values[n].dtype.startswith("complex") for n in a.outputs
        )
        where = small.calls[a.call].path
        labelled = meet(a.labelled, b.labelled) if len(a.labelled.labels) == len(b.labelled.labels) else a.labelled
        base = LossOp(
            "map", a.name, a.inputs, a.outputs, labelled.labels, labelled.special, where,
            differentiable=differentiable, is_in_module=index in small.in_modules,
        )  # fmt: skip
        traced = TracedOp(self.values, base, a, b, made, name, piece)
        self.ops += translated(traced, norms_are_plain=self.norms_are_plain)
