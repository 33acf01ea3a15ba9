"""The memory alive while a unit runs: the most bytes that its forward and backward hold beside what is kept."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from shardwright.core.model.graph import Graph, Op

LINEAR_SUMS = frozenset({"add", "bias"})
"""Names of the sums that hand the gradient on as it is, without memory of its own."""


class LiveBytes:
    """A count of the bytes alive in a unit. Every value, then every gradient, lives from the op that makes it to the
    last that reads it.

    Args:
        alias: tensor → the tensor whose memory it shares.
        needs_gradient: the tensors through which a gradient flows.
        parameters: their gradients are made, added to what is there, and gone.
        users: tensor → the ops that read it.
    """

    def __init__(
        self,
        graph: Graph,
        alias: Mapping[int, int],
        needs_gradient: Collection[int],
        parameters: Collection[int],
        users: Mapping[int, Sequence[int]],
    ) -> None:
        self.graph, self._alias = graph, alias
        self._needs_gradient, self._parameters, self._users = needs_gradient, parameters, users

    def beside_kept(
        self,
        ops: range,
        kept_by: Mapping[int, Collection[int]],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]] | None = None,
    ) -> tuple[int, int]:
        """The most bytes alive at once while the ops run forward and then backward, less all that is kept; and the same
        where the gradients that the backward is given stay to its end.

        Args:
            ops: the ops of one unit.
            kept_by: op → the memory (views resolved) that its backward reads.
            mask_bytes: op → bytes of the mask that it keeps.
            size_of: bytes of a tensor on one rank.
            working: op → bytes that it takes for a while in the forward and in the backward pass, such as copies of its
                operands in another precision. None: none does.
        """
        working = working or {}
        first_keeper: dict[int, int] = {}
        for op, roots in kept_by.items():
            for root in roots:
                first_keeper[root] = min(op, first_keeper.get(root, op))
        kept = sum(map(size_of, first_keeper)) + sum(mask_bytes.values())
        forward = self._forward_peak(ops, first_keeper, mask_bytes, size_of, working)
        backwards = (
            self._backward_peak(ops, first_keeper, mask_bytes, size_of, working, given_stays=stays)
            for stays in (False, True)
        )
        alone, given = (max(0, forward - kept, backward) for backward in backwards)
        return alone, given

    def _root(self, tensor: int) -> int:
        return self._alias.get(tensor, tensor)

    def _forward_peak(
        self,
        ops: range,
        kept: Collection[int],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]],
    ) -> int:
        made = {self._root(t) for i in ops for t in self.graph.ops[i].outputs}
        last: dict[int, int] = {}
        for index in ops:
            op = self.graph.ops[index]
            for tensor in (*op.inputs, *op.outputs):
                last[self._root(tensor)] = index
                if any(user not in ops for user in self._users.get(tensor, ())):
                    last[self._root(tensor)] = ops.stop
        dying: dict[int, list[int]] = {}
        for root, index in last.items():
            if root in made and root not in kept:
                dying.setdefault(index, []).append(root)
        live = peak = sum(size_of(root) for root in kept if root not in made)
        alive: set[int] = set()
        for index in ops:
            op = self.graph.ops[index]
            for root in {self._root(t) for t in op.outputs} - alive:
                if root in made and op.kind != "create":
                    alive.add(root)
                    live += size_of(root)
            live += mask_bytes.get(index, 0)
            peak = max(peak, live + working.get(index, (0, 0))[0])
            live -= sum(size_of(root) for root in dying.get(index, ()) if root in alive)
        return peak

    def _backward_peak(
        self,
        ops: range,
        first_keeper: Mapping[int, int],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]],
        *,
        given_stays: bool,
    ) -> int:
        """The most bytes of gradients, counted from all that is kept, which the backward gives up as it goes."""
        released: dict[int, int] = {}
        for root, index in first_keeper.items():
            released[index] = released.get(index, 0) + size_of(root)
        held = _Gradients()
        for index in ops:
            for tensor in self.graph.ops[index].outputs:
                users = self._users.get(tensor, ())
                if tensor in self._needs_gradient and (not users or any(user not in ops for user in users)):
                    held.add(tensor, size_of(tensor))
                    if given_stays:
                        held.pin(tensor)
        peak = live = of_bias = 0
        for index in reversed(ops):
            op = self.graph.ops[index]
            arriving = [t for t in op.outputs if t in held.memory]
            if arriving:
                passing = of_bias if op.kind == "contraction" else 0
                for tensor in dict.fromkeys(op.inputs):
                    if tensor not in self._needs_gradient:
                        continue
                    if self._root(tensor) in self._parameters:
                        passing += size_of(tensor) if op.kind != "view" else 0
                    elif self._hands_on(op, tensor):
                        held.share(arriving[0], tensor, size_of(tensor))
                    else:
                        held.add(tensor, size_of(tensor))
                peak = max(peak, live + held.bytes + passing + working.get(index, (0, 0))[1])
                # A product with its bias makes both gradients at once.
                of_bias = passing if op.name.endswith("/bias") else 0
                for tensor in arriving:
                    held.drop(tensor)
            live -= released.get(index, 0) + mask_bytes.get(index, 0)
        return peak

    def _hands_on(self, op: Op, tensor: int) -> bool:
        """Whether the gradient of the operand shares the memory of the result's gradient."""
        same = self.graph.tensors[tensor].elements(2) == self.graph.tensors[op.outputs[0]].elements(2)
        return same and (op.kind == "view" or op.name.rsplit("/")[-1].split(".")[-1] in LINEAR_SUMS)


class _Gradients:
    """The gradients under way; several may share one block of memory."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        """Tensor → the block of memory of its gradient."""
        self._sizes: dict[int, int] = {}
        self._owners: Counter[int] = Counter()
        self._next = 0
        self.bytes = 0

    def add(self, tensor: int, size: int) -> None:
        """Give a tensor a gradient of its own. One that is there already is added to in place, unless others share its
        memory."""
        if tensor in self.memory:
            if self._owners[self.memory[tensor]] == 1:
                return
            self.drop(tensor)
        piece, self._next = self._next, self._next + 1
        self.memory[tensor], self._sizes[piece], self._owners[piece] = piece, size, 1
        self.bytes += size

    def share(self, given: int, tensor: int, size: int) -> None:
        if tensor in self.memory:
            self.add(tensor, size)
            return
        piece = self.memory[given]
        self.memory[tensor] = piece
        self._owners[piece] += 1

    def pin(self, tensor: int) -> None:
        """Keep the memory of a gradient to the end."""
        self._owners[self.memory[tensor]] += 1

    def drop(self, tensor: int) -> None:
        piece = self.memory.pop(tensor)
        self._owners[piece] -= 1
        if not self._owners[piece]:
            self.bytes -= self._sizes.pop(piece)
