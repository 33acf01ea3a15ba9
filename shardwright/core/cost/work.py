"""What the work of a unit consists of: products, other memory traffic, collectives, and bytes kept and held."""

from dataclasses import dataclass

from shardwright.core.cost.fp8_casts import Casts
from shardwright.core.cost.working_memory import PhaseBytes


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product or attention, on one rank."""

    flops: int
    size_bytes: int
    """Bytes of the operands read and the result written."""
    batches: int
    m: int
    n: int
    k: int
    """``batches`` products of m × k by k × n; all 0 for an attention in one kernel."""
    backward_input: float
    """The FLOPs of the backward for the activations, as a multiple of the forward's."""
    backward_weight: float
    casts: Casts | None = None
    """What it takes beside itself where it is computed in fp8; None: it is not."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over a tensor axis."""

    kind: str
    """``all_reduce``, ``reduce_scatter``, ``all_gather`` or ``all_to_all``."""
    size_bytes: int
    """Bytes of one member's whole tensor: what is reduced, or what a gather gives."""
    axis: str = "tp"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a product or of attention, which may be kept where other values are computed again."""

    module: str
    """The path of the module that makes it, inside of the unit; "" for the unit's own."""
    is_plain: bool
    """Whether it is a matrix product, and not attention."""
    size_bytes: int
    """What keeping it takes on one rank; 0 where it is kept anyway."""
    product: Product
    is_read: tuple[bool, bool] = (True, True)
    """Whether anything that the backward reads is made of it: as in `UnitWork.not_again`."""


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """A part of a forward pass."""

    products: tuple[Product, ...] = ()
    vector_bytes: int = 0
    """Memory traffic of everything else, chains of elementwise ops fused."""
    eager_bytes: int = 0
    """The same where each op is a kernel of its own."""


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The work of one microbatch of one unit on one rank of the tensor axis."""

    products: tuple[Product, ...]
    vector_bytes: int
    """Memory traffic of everything else in the forward pass, chains of elementwise ops fused."""
    kernels: int
    """The number of products, and of chains of elementwise ops."""
    saved_bytes: int
    """Bytes of the activations kept for the backward pass when nothing is recomputed."""
    saved_selective_bytes: int
    """The same with the softmax part of attention recomputed (arXiv 2205.05198, section 5)."""
    selective_products: tuple[Product, ...]
    """The products that selective recompute runs once more."""
    selective_vector_bytes: int
    """The memory traffic of everything else that selective recompute runs once more."""
    unfused_dropout_bytes: int
    """Bytes kept beside ``saved_bytes`` where dropout is no kernel of its own: masks as wide as the values; and for
    attention with dropout the softmax, the mask and their product in place of its result. Below 0 where keys are so few
    that these are the smaller."""
    unfused_dropout_selective_bytes: int
    """The same beside ``saved_selective_bytes``."""
    entering_bytes: int
    """Bytes of the activations that come from earlier units, and of those that are left in objects: all that is kept
    under full recompute."""
    passing_bytes: int
    """The most bytes that a forward and backward hold beside what is kept: values and gradients under way."""
    forward_moved: tuple[Collective, ...]
    """Every collective over the tensor axis in the forward pass."""
    backward_moved: tuple[Collective, ...]
    backward_gathered: tuple[Collective, ...] = ()
    """The gathers of operands that are kept in shards, once more for the gradient of a weight."""
    step_moved: tuple[Collective, ...] = ()
    """Every collective over the tensor axis for the gradients of parameters, once a step."""
    given_bytes: int = 0
    """The bytes by which ``passing_bytes`` grows where the gradients that the unit is given stay to the end of its
    backward."""
    put_off_bytes: int | None = None
    """Bytes kept between the two halves of a split backward: the operands and the gradients of results from which the
    second half makes gradients of parameters. None: not known."""
    input_grad_bytes: tuple[int, int] | None = None
    """The most bytes that the first half holds beside what is kept, with what stays for the second; and the most where
    what is kept comes back op by op, as in ``fetched_bytes``. None: not known."""
    weight_grad_bytes: int = 0
    """The most bytes that the second half makes for a while: a gradient that cannot be added where it is made."""
    between_bytes: int = 0
    """Bytes that the input gradient of a split backward makes for the weight gradient, beside what is saved."""
    looped_bytes: int = 0
    """Bytes as in `Footprint.gathered_in_loops`. They are whole on every rank that shares the unit."""
    scales_bytes: int = 0
    """Bytes as in `Footprint.scales`."""
    kept_by_calls_bytes: tuple[int, int] | None = None
    """What is kept under full and selective recompute on one stage, as in `Footprint.kept_by_calls`."""
    working_again_bytes: tuple[int, int] | None = None
    """What is held beside that, as in `Footprint.working_again`; None: not known."""
    merged_bytes: tuple[int, int, int] | None = None
    """Where the whole step is one compiled program, the bytes saved, those passing, and the latter with the gradients
    that wait to be added to their sums; None: not known."""
    adding_bytes: int | None = None
    """``passing_bytes`` of a compiled backward with gradients of parameters that are added to their sums at once, as in
    `Footprint.adding`; None: not known."""
    forward_beside_bytes: int = 0
    """The part of ``passing_bytes`` that the forward alone may hold."""
    backward_again_bytes: int | None = None
    """What the backward may hold beside what is kept behind the first microbatch, where gradients of large weights are
    added to their sums as they are made. None: as ``passing_bytes``."""
    phases: tuple[PhaseBytes, ...] = ()
    """The bytes in the phases of the backward (`LiveBytes.backward_phases`), where the runtime gathers parameters and
    sums gradients call by call. Empty: not known."""
    beside_results_bytes: int = 0
    """Bytes kept beside results of products where everything else is computed again: what enters the unit, statistics
    of attention, and what calls leave in objects."""
    results: tuple[Result, ...] = ()
    """The results of its products and attention, which may be kept then."""
    unfused_scores_bytes: int = 0
    """Bytes of the results of products that are kept beside those where an attention with dropout is no kernel of its
    own."""
    fetched_bytes: int = 0
    """The most bytes that the passes hold where all that is kept is elsewhere between them, and comes back op by op."""
    fetched_unfused_bytes: tuple[int, int] | None = None
    """``fetched_bytes``, and that part of ``input_grad_bytes``, where an attention with dropout is no kernel of its
    own. None: the same."""
    left_bytes: tuple[int, int] = (0, 0)
    """Bytes that calls leave in objects which they were given, such as a cache of keys and values; and those of them
    that are no results of products. Recomputed units hold the objects, as they are given them once more."""
    not_again: tuple[ForwardPart, ForwardPart] = (ForwardPart(), ForwardPart())
    """What a recomputed unit need not run again, as nothing that the backward reads is made of it (`cost.run_again`):
    where masks of dropout are made with what they drop, and where they are made without, as by compilers."""
    own_again: ForwardPart = ForwardPart()
    """What checkpoints of the model's own run again, where the plan does not recompute the unit."""
    eager_bytes: int = 0
    """Memory traffic of everything beside the products in the forward pass where each op is a kernel of its own."""
    eager_selective_bytes: int = 0
    """The same of what selective recompute runs once more."""
    eager_kernels: int = 0
    """The number of products, and of ops that are kernels of their own."""
    op_by_op_bytes: int = 0
    """Memory traffic in the forward pass beside ``vector_bytes`` where kernels are written by hand for the chains of a
    layer, of the ops that none of them takes (`cost.handwritten_kernels`)."""
    op_by_op_kernels: int = 0
    """Kernels of such ops beside ``kernels``."""

    @property
    def forward_flops(self) -> int:
        return sum(p.flops for p in self.products)

    @property
    def backward_flops(self) -> float:
        return sum(p.flops * (p.backward_input + p.backward_weight) for p in self.products)
