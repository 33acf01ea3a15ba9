"""Sums over ranks of a gradient of a few rows: gathered as rows, or made whole and summed (`core.cost.row_gradients`).

All ranks take the same form: before anything large moves they tell each other how many rows they have, and what their
gradients are like. Rows are added up on each rank first, so that one that a batch looked up a thousand times travels
once.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardwright.core.cost.row_gradients import POLICIES, Policy, RowGradient
from shardwright.core.errors import ShardwrightError, nearest

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def reduce_gradient(
    gradient: torch.Tensor, policy: Policy = "auto", *, group: Any = None, limit_bytes: int | None = None
) -> torch.Tensor:
    """The sum over ranks of a gradient [rows, …], of which each rank has some rows (arXiv 1905.04035).

    Every rank of the group calls this, with a sparse COO tensor of one sparse dim, as ``nn.Embedding(sparse=True)``
    makes, or with a dense tensor. A rank without rows gives an empty one.

    Args:
        policy: "dense": the gradient is made whole and summed, and the result is dense. "sparse": rows are gathered,
            and the result is sparse and coalesced. "auto": what moves fewer bytes, in the result's form.
        group: the process group; None: the default one.
        limit_bytes: the most bytes that "auto" may hold at once, where one of the two forms can do with so many.

    Returns:
        The sum, the same on all ranks.

    Raises:
        ShardwrightError: on every rank, where gradients differ in shape, dtype or policy, or one cannot be summed.
    """
    own, (form, _) = _agreed(gradient, policy, group, limit_bytes)
    return _summed_whole(own, group) if form == "dense" else _gathered(own, group)


def sum_as_made(gradient: torch.Tensor, policy: Policy, group: Any) -> torch.Tensor:
    """The sum over ranks of a gradient, in the layout that one rank with all samples would have: rows where that of
    every rank is of rows, so that optimizers know which ones were looked up. It travels as in `reduce_gradient`."""
    own, (form, are_rows) = _agreed(gradient, policy, group, None)
    if form == "sparse":
        found = _gathered(own, group)
        return found if are_rows else found.to_dense()
    if not are_rows:
        return _summed_whole(own, group)
    is_there = torch.zeros(own.shape[0], dtype=torch.uint8, device=own.device)
    is_there[own.indices()[0]] = 1
    dist.all_reduce(is_there, op=dist.ReduceOp.MAX, group=group)
    whole, rows = _summed_whole(own, group), is_there.nonzero().T
    return torch.sparse_coo_tensor(rows, whole[rows[0]], own.shape, is_coalesced=True, check_invariants=False)


def row_tables(model: nn.Module) -> frozenset[torch.Tensor]:
    """The parameters of which gradients of rows are made: tables of ``sparse=True`` that no other module shares."""
    tables: set[torch.Tensor] = set()
    others: set[torch.Tensor] = set()
    for module in model.modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        (tables if is_table else others).update(module.parameters(recurse=False))
    return frozenset(tables - others)


def _summed_whole(own: torch.Tensor, group: Any) -> torch.Tensor:
    whole = own.to_dense() if own.is_sparse else own.clone()
    dist.all_reduce(whole, group=group)
    return whole


def _problem(gradient: torch.Tensor, policy: str) -> str:
    """The reason why a gradient cannot be summed, or nothing. It is told to all ranks, so that none waits."""
    if policy not in POLICIES:
        return f"policy={policy!r}: {nearest(str(policy), POLICIES)}"
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        return f"its layout is {gradient.layout}: expected torch.strided or torch.sparse_coo"
    if gradient.is_sparse and gradient.sparse_dim() != 1:
        return f"it has {gradient.sparse_dim()} sparse dims: expected 1, the rows"
    if not gradient.dim():
        return "it has no dims: expected [rows, …]"
    if gradient.dtype not in _DTYPES:
        return f"its dtype is {gradient.dtype}: expected one of {', '.join(map(str, _DTYPES))}"
    return ""


class _Form(NamedTuple):
    """The form in which a gradient travels, and whether every rank has rows of it."""

    travels: Literal["dense", "sparse"]
    are_rows: bool


def _agreed(given: torch.Tensor, policy: Policy, group: Any, limit_bytes: int | None) -> tuple[torch.Tensor, _Form]:
    """This rank's gradient, each row once, and the form that all ranks take. Raises ShardwrightError on all of them
    where they differ."""
    problem = _problem(given, policy)
    gradient = given.coalesce() if given.is_sparse and not problem else given
    rows = gradient.shape[0] if gradient.dim() else 0
    entries = gradient.shape[1:].numel() if gradient.dim() else 0
    own = 0 if problem else gradient._nnz() if gradient.is_sparse else rows
    dtype = _DTYPES.index(gradient.dtype) if gradient.dtype in _DTYPES else -1
    limit = -1 if limit_bytes is None else limit_bytes
    told = [int(bool(problem)), rows, entries, dtype, POLICIES.index(policy) if policy in POLICIES else -1, limit,
            int(gradient.is_sparse), own]  # fmt: skip
    size = dist.get_world_size(group)
    everyone = torch.empty(size * len(told), dtype=torch.int64, device=gradient.device)
    dist.all_gather_into_tensor(everyone, torch.tensor(told, device=gradient.device), group=group)
    every = everyone.view(size, len(told)).tolist()
    if bad := [rank for rank, (is_bad, *_) in enumerate(every) if is_bad]:
        why = f": {problem}" if problem else ""
        raise ShardwrightError(f"reduce_gradient: the gradients of ranks {bad} cannot be summed{why}")
    names = ("", "rows", "entries of a row", "dtype", "policy", "limit_bytes")
    for at in range(1, len(names)):
        values = [said[at] for said in every]
        if len(set(values)) > 1:
            shown = [str(_DTYPES[v]) if at == 3 else POLICIES[v] if at == 4 else v for v in values]
            raise ShardwrightError(f"reduce_gradient: ranks differ in {names[at]}, {shown}: expected the same on all")
    of = RowGradient(rows, entries * gradient.element_size(), max(said[-1] for said in every), size)
    return gradient, _Form(of.chosen(limit_bytes) if policy == "auto" else policy, all(said[-2] for said in every))


def _as_rows(gradient: torch.Tensor) -> torch.Tensor:
    """A dense gradient as rows, those of zeros left out: they add nothing."""
    rows = gradient.flatten(1).ne(0).any(1).nonzero().T if gradient.dim() > 1 else gradient.ne(0).nonzero().T
    return torch.sparse_coo_tensor(rows, gradient[rows[0]], gradient.shape, is_coalesced=True, check_invariants=False)


def _gathered(own_gradient: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of coalesced rows of all ranks. A gather is of equal parts, so ranks with fewer rows fill up."""
    gradient = own_gradient if own_gradient.is_sparse else _as_rows(own_gradient)
    size, device = dist.get_world_size(group), gradient.device
    own = gradient._nnz()
    counts = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(counts, torch.tensor([own], device=device), group=group)
    most = int(counts.max())
    values = gradient.values()
    rows = torch.zeros(most, dtype=torch.int64, device=device)
    rows[:own] = gradient.indices()[0]
    filled = torch.zeros(most, *values.shape[1:], dtype=values.dtype, device=device)
    filled[:own] = values
    all_rows = torch.empty(size * most, dtype=rows.dtype, device=device)
    all_values = torch.empty(size * most, *values.shape[1:], dtype=values.dtype, device=device)
    if most:
        dist.all_gather_into_tensor(all_rows, rows, group=group)
        dist.all_gather_into_tensor(all_values, filled, group=group)
    there = (torch.arange(most, device=device) < counts[:, None]).flatten()
    found = torch.sparse_coo_tensor(all_rows[there][None], all_values[there], gradient.shape, check_invariants=False)
    return found.coalesce()
