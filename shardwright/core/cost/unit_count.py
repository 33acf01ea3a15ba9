"""The work of one unit, added up op by op."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardwright.core.cost.fp8_casts import casts
from shardwright.core.cost.handwritten_kernels import loss_ops, softmax_op_by_op
from shardwright.core.cost.op_kinds import ALONE_KINDS, FREE_KINDS, PRECISION_BYTES, is_part_of_a_kernel
from shardwright.core.cost.op_shards import Pieces
from shardwright.core.cost.work import Collective, ForwardPart, Product, Result, UnitWork
from shardwright.core.cost.working_memory import PhaseBytes
from shardwright.core.model.fold import Unit, module_inside
from shardwright.core.model.op_memory import at

if TYPE_CHECKING:
    from shardwright.core.cost.unit_work import WorkCounter


class UnitCount:
    """The work of one unit, added up op by op."""

    def __init__(
        self, counter: "WorkCounter", unit: Unit, batch: int, precision: str, cut: Pieces, gathered_stays: bool
    ) -> None:
        self.counter, self.unit, self.batch, self.precision, self.cut = counter, unit, batch, precision, cut
        self.gathered_stays = gathered_stays
        self.ops = range(unit.first_op, unit.end_op)
        self.made_here = {t: i for i in self.ops for t in counter.graph.ops[i].outputs}
        self.products: list[Product] = []
        self.again: list[Product] = []
        self.traffic: dict[int, tuple[int, int]] = {}
        """The bytes that each op beside the products moves: in a chain, and as a kernel of its own."""
        self.products_of: dict[int, Product] = {}
        self.again_as = tuple(counter.run_again(unit, compiled=compiled) for compiled in (False, True))
        """The ops that a recomputed backward runs, as in `UnitWork.not_again`."""
        self.results: list[tuple[Result, int]] = []
        """The result of each product, and the memory of that."""
        self.small: list[Collective] = []
        self.small_backward: list[Collective] = []
        self.fp8 = counter.fp8.ops if precision == "fp8" else {}
        """Op → the position of its weight, for the products in fp8."""
        self.working: dict[int, tuple[int, int]] = {}
        """Op → the bytes that it takes for a while in the forward and in the backward pass, beside what it reads."""
        self.vector_bytes = self.vector_again = 0
        self.eager_bytes = self.eager_again = self.eager_kernels = 0
        self.loss_ops = loss_ops(counter.graph, self.ops, ALONE_KINDS)
        self.op_by_op_bytes = self.op_by_op_kernels = self.loss_kernels = 0
        self.kept: dict[int, int] = {}
        self.kept_by: dict[int, list[int]] = {}
        self.mask_bytes: dict[int, int] = {}
        self.attended: dict[int, int] = {}
        """What attention with dropout keeps where it is one kernel."""
        self.kept_unfused: dict[int, int] = {}
        """What it keeps where it is none, beside `unfused`."""
        self.kept_by_unfused: dict[int, list[int]] = {}
        """Such an op and what it keeps of its operands as they are."""
        self.backward_unfused: dict[int, int] = {}
        """Such an op and the bytes that its backward holds beside gradients of its operands."""
        self.scores = self.unfused = self.statistics = self.unfused_scores = 0

    def size_bytes(self, tensor: int) -> int:
        """Bytes of a whole tensor."""
        return self.counter.size_bytes(tensor, self.batch, self.precision)

    def memory(self, tensor: int) -> int:
        """Bytes of a tensor on one rank, as it lies between ops."""
        if tensor in self.counter.unmade:
            return 0
        size = self.size_bytes(tensor) // self.cut.memory_ways(tensor)
        return size + int(size * self.counter.handed_back.get(tensor, 0.0))

    def held(self, index: int, position: int) -> int:
        """Bytes of an operand of an op on one rank."""
        op = self.counter.graph.ops[index]
        return self.size_bytes((*op.inputs, *op.outputs)[position]) // self.cut.ways(index, position)

    def _kept_bytes(self, index: int, root: int) -> int:
        """Bytes that an op keeps of a value on one rank."""
        inputs = enumerate(self.counter.graph.ops[index].inputs)
        if not self.gathered_stays:
            return self.memory(root)
        read = [self.cut.ways(index, i) for i, t in inputs if self.counter.memory_of(t) == root]
        return max([self.memory(root), *(self.size_bytes(root) // ways for ways in read)])

    def add_traffic(self, index: int) -> None:
        """Add an op's product or memory traffic, and the small sums inside it."""
        op, graph, is_again = (
            self.counter.graph.ops[index],
            self.counter.graph,
            index in self.counter.kept.computed_again,
        )
        for axis, label in self.cut.combined(index, op):
            whole = graph.label_sizes(op, self.batch)[label]
            self.small.append(Collective("all_reduce", 2 * self.size_bytes(op.outputs[0]) // whole, axis))
        if op.kind in ALONE_KINDS:
            size = sum(self.held(index, i) for i in range(len(op.inputs) + len(op.outputs)))
            made = self.counter.product(op, self.batch, self.cut.of_labels(index, op), size)
            self.products.append(self._in_fp8(index, made) if index in self.fp8 else made)
            result = sum(self.held(index, len(op.inputs) + i) for i in range(len(op.outputs)))
            self.products_of[index] = self.products[-1]
            is_read = index in self.again_as[0], index in self.again_as[1]
            made_by = Result(
                module_inside(graph, self.unit, op), op.kind == "contraction", result, self.products[-1], is_read
            )
            self.results.append((made_by, self._root(op.outputs[0])))
            if is_again:
                self.again.append(self.products[-1])
        elif op.kind not in FREE_KINDS:
            moved = self.counter.unfused_bytes(index, self.unit, self.made_here, self.held)
            self.vector_bytes += moved
            self.vector_again += moved if is_again else 0
            self.traffic[index] = moved, 0
            if not is_part_of_a_kernel(op):
                whole = self.counter.whole_bytes(op, partial(self.held, index))
                self.traffic[index] = moved, whole
                self.eager_kernels += 1
                self.eager_bytes += whole
                self.eager_again += whole if is_again else 0
                if index in self.loss_ops:
                    self.op_by_op_bytes += whole - moved
                    self.loss_kernels += 1
                elif op.kind == "softmax" and self.counter.kept.is_attention_score(op.outputs[0]):
                    size, kernels = softmax_op_by_op(graph, op, self.batch, self.cut.of_labels(index, op))
                    self.op_by_op_bytes += size
                    self.op_by_op_kernels += kernels

    def _not_again(self, again: Collection[int]) -> ForwardPart:
        return self._part([index for index in self.ops if index not in again])

    def _part(self, ops: Collection[int]) -> ForwardPart:
        moved = [self.traffic.get(index, (0, 0)) for index in ops]
        products = tuple(self.products_of[index] for index in ops if index in self.products_of)
        return ForwardPart(products, sum(fused for fused, _ in moved), sum(whole for _, whole in moved))

    def _in_fp8(self, index: int, product: Product) -> Product:
        """A product computed in fp8, with its casts. The scale of an operand that several ranks share is that of the
        whole, so that they tell each other their largest entries."""
        width, weight = PRECISION_BYTES[self.precision], self.fp8[index]
        entries = [self.held(index, position) // width for position in (1 - weight, weight, 2)]
        taken = casts(*entries)
        self.working[index] = taken.forward_working_bytes, taken.backward_working_bytes
        split: dict[str, set[int]] = {}
        for axis, position in self.cut.split_operands(index):
            split.setdefault(axis, set()).add(position)
        for axis, positions in split.items():
            if positions - {2}:
                self.small.append(Collective("all_reduce", 2 * PRECISION_BYTES["fp32"], axis))
            if 2 in positions and product.backward_input + product.backward_weight:
                self.small_backward.append(Collective("all_reduce", PRECISION_BYTES["fp32"], axis))
        return replace(product, size_bytes=sum(entries[:2]) + width * entries[2], casts=taken)

    def add_saved(self, index: int) -> None:
        """Add what an op keeps for its backward."""
        counter, cut, batch = self.counter, self.cut, self.batch
        op, saved = counter.graph.ops[index], counter.kept
        width = counter.width(op.inputs[0], self.precision) if op.inputs else 0
        share = cut.share(index)
        if (seen := saved.seen(op, self.precision)) is not None:
            kept, forward, backward = (at(line, batch) // share for line in (seen.kept, seen.forward, seen.backward))
            if op.memory is not None and not op.memory.is_known:
                forward = backward = sum(self.held(index, n) for n in range(len(op.inputs) + len(op.outputs)))
            self.mask_bytes[index] = kept
            self.statistics += kept
            casts = self.working.get(index, (0, 0))  # of a product in fp8
            self.working[index] = forward + casts[0], backward + casts[1]
            self._add_kept(index, saved.by(op), self.kept)
            return
        scores = saved.score_bytes(op, batch, width)
        self.scores += scores // share
        of_op = saved.statistics(op, batch) // (share if not any(cut.combined(index, op)) else 1)
        self.statistics += of_op
        widened = sum(self.held(index, i) * width for i in saved.widened(op))
        self.statistics += widened
        if op.kind == "gather" and any(op.role(label) == "index" for label in cut.of_labels(index, op)):
            # For rows that lie on other ranks: places in the own shard, and which are there.
            self.statistics += sum((8 + 1) * counter.graph.tensors[t].elements(batch) for t in op.inputs[1:])
        drops = saved.drops_scores(op)
        if drops:
            if op.memory is not None:
                self.working[index] = at(op.memory.bytes_of(self.precision).forward, batch) // share, 0
            whole, roots = saved.unfused(op, batch, self.precision, width)
            self.unfused += (whole - scores) // share - of_op - (widened if op.memory is not None else 0)
            self._note_kept(index, roots, self.kept_unfused)
            self.kept_by_unfused[index] = roots
            of_scores = saved.unfused_scores_bytes(op, batch, width) // share
            self.unfused_scores += of_scores
            # The mask or the softmax, the gradient of what it made and that of what it was given, when the gradient of
            # the result is gone and those of query and key are not made.
            others = sum(self.held(index, place) for place in (0, 1, len(op.inputs)))
            self.backward_unfused[index] = max(0, 3 * of_scores - others)
        self._add_kept(index, saved.by(op), self.attended if drops else self.kept)
        for mask in saved.masks(op):
            entry = counter.width(mask, self.precision)
            self.kept[-1 - mask] = self.mask_bytes[index] = self.held(index, len(op.inputs)) // entry

    def _root(self, tensor: int) -> int:
        """The tensor whose memory this one is a view or a part of."""
        return self.counter.kept.roots.get(tensor, tensor)

    def _left(self) -> dict[int, int]:
        """The memory of the unit's own that its calls leave in objects, and its bytes on one rank. What a later unit
        reads is not among it: that enters the unit."""
        tensors, found = self.counter.graph.tensors, dict[int, int]()
        for tensor in self.made_here:
            root = self._root(tensor)
            if tensors[tensor].is_left and root in self.made_here and self.counter.is_read_within(tensor, self.ops):
                found[root] = self.memory(root)
        return found

    def _added_at_once(self) -> set[int]:
        """The weights whose gradients products add to sums that are there."""
        counter, found = self.counter, set[int]()
        least = counter.graph.memory_traits.added_from_entries
        for index in counter.put_off(self.ops) if least else ():
            op = counter.graph.ops[index]
            if op.base_name in ("linear", "addmm"):
                roots = (counter.memory_of(tensor) for tensor in op.inputs)
                found.update(r for r in roots if self._entries(r) >= least and counter.is_read_within(r, self.ops))
        return found

    def _entries(self, tensor: int) -> int:
        """The entries of a tensor on one rank."""
        return self.memory(tensor) // self.counter.width(tensor, self.precision)

    def _add_kept(self, index: int, roots: list[int], found: dict[int, int]) -> None:
        """Add the memory that an op keeps to what was found."""
        if roots:
            self.kept_by[index] = roots
            self._note_kept(index, roots, found)

    def _note_kept(self, index: int, roots: list[int], found: dict[int, int]) -> None:
        found.update((root, max(found.get(root, 0), self._kept_bytes(index, root))) for root in roots)

    def _unfused(
        self,
    ) -> tuple[range, dict[int, list[int]], dict[int, int], Callable[[int], int], dict[int, tuple[int, int]]] | None:
        """What the ops hold where an attention with dropout is no kernel of its own, as `LiveBytes` takes it; None
        where there is none."""
        if not self.kept_by_unfused:
            return None
        kept_by = {index: roots for index, roots in (self.kept_by | self.kept_by_unfused).items() if roots}
        working = dict(self.working)
        for index, size in self.backward_unfused.items():
            working[index] = self.working.get(index, (0, 0))[0], size
        return self.ops, kept_by, self.mask_bytes, self.memory, working

    def work(self, moved: tuple[tuple[Collective, ...], ...]) -> UnitWork:
        """The work of all ops that were added; ``moved`` are the collectives between them."""
        counter, is_score = self.counter, self.counter.kept.is_attention_score
        unfused = self.unfused + sum(
            sign * size
            for sign, found in ((1, self.kept_unfused), (-1, self.attended))
            for key, size in found.items()
            if key not in self.kept
        )
        kept = self.kept | self.attended
        masks = {key: size * (counter.width(-1 - key, self.precision) - 1) for key, size in kept.items() if key < 0}
        entering = {
            counter.memory_of(t): self.cut.entering_ways(t) for t in counter.entering(self.unit, self.made_here)
        }
        left = self._left()
        held = self.ops, self.kept_by, self.mask_bytes, self.memory, self.working
        passing, passing_beside_given = counter.live.beside_kept(*held)
        phases: tuple[PhaseBytes, ...] = ()
        if counter.graph.memory_traits.gathers_units:
            phases = counter.live.backward_phases(counter.calls(self.unit), *held)
        large = self._added_at_once()
        again = counter.live.backward_beside_kept(large, *held) if large else None
        put_off = counter.put_off(self.ops)
        input_grad, fetched = counter.live.input_grad(put_off, *held), counter.live.fetched(*held)
        apart = self._unfused()
        fetched_unfused = fetched, input_grad[1]
        if apart is not None:
            fetched_unfused = counter.live.fetched(*apart), counter.live.input_grad(put_off, *apart)[1]
        forward, backward, gathered, at_the_end = moved
        entered = sum(self.size_bytes(t) // ways for t, ways in entering.items())
        of_products = {root for _, root in self.results}
        left_beside = sum(size for root, size in left.items() if root not in of_products)
        held_anyway = sum(made.size_bytes for made, root in self.results if root in left)
        results = (replace(made, size_bytes=0) if root in left else made for made, root in self.results)
        return UnitWork(
            products=tuple(self.products),
            vector_bytes=self.vector_bytes,
            kernels=len(self.products) + counter.chains(self.unit),
            saved_bytes=sum(kept.values()) + self.scores + self.statistics,
            saved_selective_bytes=self.statistics + sum(size for key, size in kept.items() if not is_score(key)),
            unfused_dropout_bytes=sum(masks.values()) + unfused,
            unfused_dropout_selective_bytes=sum(size for key, size in masks.items() if not is_score(key)),
            selective_products=tuple(self.again),
            selective_vector_bytes=self.vector_again,
            entering_bytes=entered + sum(left.values()),
            left_bytes=(sum(left.values()), left_beside),
            fetched_bytes=fetched,
            fetched_unfused_bytes=fetched_unfused,
            passing_bytes=passing,
            given_bytes=passing_beside_given - passing,
            forward_moved=(*forward, *self.small),
            backward_moved=(*backward, *self.small_backward),
            backward_gathered=gathered,
            step_moved=at_the_end,
            put_off_bytes=counter.put_off_bytes(self.ops, self.cut, self.held),
            input_grad_bytes=input_grad,
            weight_grad_bytes=counter.weight_grad_bytes(put_off, self.held),
            forward_beside_bytes=counter.live.forward_beside_kept(*held) if phases else passing,
            backward_again_bytes=again,
            phases=phases,
            beside_results_bytes=entered + left_beside + self.statistics + held_anyway,
            results=tuple(results),
            not_again=(self._not_again(self.again_as[0]), self._not_again(self.again_as[1])),
            own_again=self._part([index for index in self.ops if counter.graph.ops[index].is_run_again]),
            unfused_scores_bytes=self.unfused_scores,
            eager_bytes=self.eager_bytes,
            eager_selective_bytes=self.eager_again,
            eager_kernels=len(self.products) + self.eager_kernels,
            op_by_op_bytes=self.op_by_op_bytes,
            op_by_op_kernels=self.op_by_op_kernels + max(0, self.loss_kernels - 1),  # one is among `chains`
        )
