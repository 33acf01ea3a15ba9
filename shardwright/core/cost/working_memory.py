"""The memory alive while a unit runs: the most bytes that its forward and backward hold beside what is kept."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.core.model.graph import Graph, Op
from shardwright.core.model.parameter_calls import ParameterCall

LINEAR_SUMS = frozenset({"add", "bias"})
"""Names of the sums that hand the gradient on as it is, without memory of its own."""


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """Bytes alive in one phase of a unit's backward pass, counted from all that the unit keeps; below 0 where the pass
    has given up more than it holds."""

    passing: int
    """The most while it runs, where gradients of parameters are added to sums as soon as they are made."""
    collecting: int
    """The most where those of one call stay until all of them are made."""
    ending: int
    """When it is over, without gradients of parameters."""


class _BackwardOp(NamedTuple):
    """The bytes alive at one op of a backward pass, counted from all that is kept."""

    op: int
    most: int
    """While it runs, with the gradients of parameters that it makes."""
    left: int
    """When it is over, without these."""
    made: dict[int, int]
    """The gradients of parameters that it makes: memory of the parameter → bytes."""
    again: int
    """The bytes of gradients of parameters in ``most`` that the op before it made."""


class LiveBytes:
    """A count of the bytes alive in a unit. Every value, then every gradient, lives from the op that makes it to the
    last that reads it.

    Args:
        alias: tensor → the tensor whose memory it shares.
        needs_gradient: the tensors through which a gradient flows.
        parameters: their gradients are made, added to what is there, and gone.
        users: tensor → the ops that read it.
        kept_from: memory → the first op whose backward reads it.
        apart: memory that is counted elsewhere where an op before a unit made it.
    """

    def __init__(
        self,
        graph: Graph,
        alias: Mapping[int, int],
        needs_gradient: Collection[int],
        parameters: Collection[int],
        users: Mapping[int, Sequence[int]],
        kept_from: Mapping[int, int],
        apart: Collection[int] = (),
    ) -> None:
        self.graph, self._alias, self._kept_from, self._apart = graph, alias, kept_from, apart
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
        first_keeper = _first_keepers(kept_by)
        forward = self.forward_beside_kept(ops, kept_by, mask_bytes, size_of, working)
        backwards = (
            max((op.most for op in self._backward(ops, first_keeper, mask_bytes, size_of, working, stays)), default=0)
            for stays in (False, True)
        )
        alone, given = (max(forward, backward) for backward in backwards)
        return alone, given

    def backward_beside_kept(
        self,
        added: Collection[int],
        ops: range,
        kept_by: Mapping[int, Collection[int]],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]],
    ) -> int:
        """The most bytes alive at once while the ops run backward, less all that is kept, where products add the
        gradients of the parameters ``added`` to their sums as they make them. The other arguments are those of
        `beside_kept`."""
        backward = self._backward(
            ops, _first_keepers(kept_by), mask_bytes, size_of, working, given_stays=False, added=added
        )
        return max((one.most for one in backward), default=0)

    def forward_beside_kept(
        self,
        ops: range,
        kept_by: Mapping[int, Collection[int]],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]],
    ) -> int:
        """The most bytes alive at once while the ops run forward, less all that is kept; the arguments are those of
        `beside_kept`."""
        first_keeper = _first_keepers(kept_by)
        kept = sum(map(size_of, first_keeper)) + sum(mask_bytes.values())
        return max(0, self._forward_peak(ops, first_keeper, mask_bytes, size_of, working) - kept)

    def fetched(
        self,
        ops: range,
        kept_by: Mapping[int, Collection[int]],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]],
    ) -> int:
        """The most bytes alive at once where all that is kept lies elsewhere between forward and backward: each value
        comes back for the first op of the backward that reads it and goes with the last. The arguments are those of
        `beside_kept`."""
        for_a_while = {op: (working.get(op, (0, 0))[0] + mask_bytes.get(op, 0), 0) for op in ops}
        forward = self._forward_peak(ops, (), {}, size_of, for_a_while)
        comes = Counter(mask_bytes)
        for root, index in _last_keepers(kept_by).items():
            comes[index] += size_of(root)
        backward = self._backward(ops, _first_keepers(kept_by), mask_bytes, size_of, working, False, comes)
        return max(forward, max((one.most for one in backward), default=0))

    def input_grad(
        self,
        put_off: Collection[int],
        ops: range,
        kept_by: Mapping[int, Collection[int]],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]],
    ) -> tuple[int, int]:
        """The most bytes alive at once in the input gradient of a split backward, less all that is kept; and the same
        where all that is kept comes back op by op, counted from nothing (`fetched`). The ops ``put_off`` leave the
        gradients of parameters to the weight gradient: their operands, and the gradients of their results, stay. The
        other arguments are those of `beside_kept`."""
        first_keeper = _first_keepers(kept_by)
        comes = Counter(mask_bytes)
        for root, index in _last_keepers(kept_by).items():
            comes[index] += size_of(root)
        beside, fetched = (
            max(
                (
                    one.most
                    for one in self._backward(
                        ops, first_keeper, mask_bytes, size_of, working, False, coming, frozenset(put_off)
                    )
                ),
                default=0,
            )
            for coming in (None, comes)
        )
        return beside, fetched

    def backward_phases(
        self,
        calls: Sequence[ParameterCall],
        ops: range,
        kept_by: Mapping[int, Collection[int]],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]],
    ) -> tuple[PhaseBytes, ...]:
        """The bytes alive in each phase of the backward pass: before it comes to a call with parameters, in each such
        call from the last to the first, and behind them. The other arguments are those of `beside_kept`."""
        waits = {self.graph.parameters[number].tensor for call in calls for number in call.waiting}
        begins = max((call.end_op for call in calls), default=ops.start)
        ends = [begins, *(call.first_use for call in reversed(calls)), ops.start]
        found: list[PhaseBytes] = []
        passing = collecting = ending = collected = waiting = 0
        for one in self._backward(ops, _first_keepers(kept_by), mask_bytes, size_of, working, given_stays=False):
            while one.op < ends[len(found)]:
                found.append(PhaseBytes(passing, collecting, ending))
                passing = collecting = ending
                collected = 0
            passing = max(passing, one.most + waiting)
            collecting = max(collecting, one.most + waiting + collected - one.again)
            collected += sum(size for root, size in one.made.items() if root not in waits)
            waiting += sum(size for root, size in one.made.items() if root in waits)
            ending = one.left + waiting
        while len(found) < len(ends):
            found.append(PhaseBytes(passing, collecting, ending))
            passing = collecting = ending
        return tuple(found)

    def _enters(self, root: int, ops: range) -> bool:
        """Whether a value is an activation that an op before these makes, and that no backward of such an op reads."""
        maker = self.graph.producer.get(root)
        if maker is None or maker >= ops.start or root in self._apart:
            return False
        return self._kept_from.get(root, ops.start) >= ops.start

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
        # What comes from earlier units stays until it is read, also where no backward reads it.
        entering = {root for root in last if root not in made and root not in kept and self._enters(root, ops)}
        for root in entering:
            dying.setdefault(last[root], []).append(root)
        live = sum(size_of(root) for root in kept if root not in made) + sum(map(size_of, entering))
        peak = live
        alive: set[int] = set(entering)
        for index in ops:
            op = self.graph.ops[index]
            for root in {self._root(t) for t in op.outputs} - alive:
                if root in made:
                    alive.add(root)
                    live += size_of(root)
            live += mask_bytes.get(index, 0)
            peak = max(peak, live + working.get(index, (0, 0))[0])
            live -= sum(size_of(root) for root in dying.get(index, ()) if root in alive)
        return peak

    def _backward(
        self,
        ops: range,
        first_keeper: Mapping[int, int],
        mask_bytes: Mapping[int, int],
        size_of: Callable[[int], int],
        working: Mapping[int, tuple[int, int]],
        given_stays: bool,
        comes: Mapping[int, int] | None = None,
        put_off: Collection[int] = (),
        added: Collection[int] = (),
    ) -> Iterator[_BackwardOp]:
        """The ops of the backward pass, which gives up what is kept as it goes. ``comes``: the bytes of it that come
        for each op; bytes are counted from nothing then, and else from all that is kept. ``put_off``: the ops that make
        no gradients of parameters, and whose operands and gradients of results stay. ``added``: the parameters whose
        gradients products add to sums that are there."""
        released: dict[int, int] = {}
        staying = {self._root(tensor) for index in put_off for tensor in self.graph.ops[index].inputs}
        for root, index in first_keeper.items():
            if root not in staying:
                released[index] = released.get(index, 0) + size_of(root)
        held = _Gradients()
        for index in ops:
            for tensor in self.graph.ops[index].outputs:
                users = self._users.get(tensor, ())
                if tensor in self._needs_gradient and (not users or any(user not in ops for user in users)):
                    held.add(tensor, size_of(tensor))
                    if given_stays:
                        held.pin(tensor)
        live = of_bias = 0
        for index in reversed(ops):
            op = self.graph.ops[index]
            live += comes.get(index, 0) if comes else 0
            arriving = [t for t in op.outputs if t in held.memory]
            made: dict[int, int] = {}
            most = again = twice = 0
            if arriving:
                again = of_bias if op.kind == "contraction" else 0
                for tensor in dict.fromkeys(op.inputs):
                    if tensor not in self._needs_gradient:
                        continue
                    if (root := self._root(tensor)) in self._parameters:
                        is_added = root in added and op.kind == "contraction"
                        if op.kind != "view" and index not in put_off and not is_added:
                            made[root] = made.get(root, 0) + size_of(tensor)
                        continue
                    if tensor in held.memory and not self._repeats(op, tensor) and not self._hands_on(op, tensor):
                        twice += size_of(tensor)  # the sum's term, until it is added
                    if self._repeats(op, tensor):
                        if tensor not in held.memory:
                            held.add(tensor, 0)
                            held.pin(tensor)  # nothing can be added to it in place
                    elif self._hands_on(op, tensor):
                        held.share(arriving[0], tensor, size_of(tensor))
                    else:
                        held.add(tensor, size_of(tensor))
                passing = again + twice + sum(made.values())
                most = live + held.bytes + passing + working.get(index, (0, 0))[1]
                # A product with its bias makes both gradients at once.
                of_bias = passing if op.name.endswith("/bias") else 0
                for tensor in arriving:
                    if index in put_off:
                        held.pin(tensor)
                    held.drop(tensor)
            live -= released.get(index, 0) + mask_bytes.get(index, 0)
            left = live + held.bytes
            yield _BackwardOp(index, most if arriving else left, left, made, again)

    def _repeats(self, op: Op, tensor: int) -> bool:
        """Whether the gradient of the operand repeats fewer numbers, and has no memory of its own."""
        return op.memory is not None and any(op.inputs[i] == tensor for i in op.memory.weightless)

    def _hands_on(self, op: Op, tensor: int) -> bool:
        """Whether the gradient of the operand shares the memory of the result's gradient."""
        if op.memory is not None:
            return any(op.inputs[i] == tensor for i in op.memory.handed_on)
        same = self.graph.tensors[tensor].elements(2) == self.graph.tensors[op.outputs[0]].elements(2)
        return same and (op.kind == "view" or op.name.rsplit("/")[-1].split(".")[-1] in LINEAR_SUMS)


def _first_keepers(kept_by: Mapping[int, Collection[int]]) -> dict[int, int]:
    """The first op that keeps each memory: the backward pass gives it up behind that op."""
    found: dict[int, int] = {}
    for op, roots in kept_by.items():
        for root in roots:
            found[root] = min(op, found.get(root, op))
    return found


def _last_keepers(kept_by: Mapping[int, Collection[int]]) -> dict[int, int]:
    """The last op that keeps each memory: the backward pass reads it there first."""
    return {root: op for op, roots in sorted(kept_by.items()) for root in roots}


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
