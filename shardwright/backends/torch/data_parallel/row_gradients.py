"""Sums over ranks of a gradient of a few rows: gathered as rows, or made whole and summed (`core.cost.row_gradients`).

All ranks take the same form: before anything large moves they tell each other how many rows they have, and what their
gradients are like. Rows are added up on each rank first, so that one that a batch looked up a thousand times travels
once.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist

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
    problem = _problem(gradient, policy)
    own = gradient.coalesce() if gradient.is_sparse and not problem else gradient
    form = _agreed(own, policy, problem, group, limit_bytes)
    if form == "dense":
        whole = own.to_dense() if own.is_sparse else own.clone()
        dist.all_reduce(whole, group=group)
        return whole
    return _gathered(own if own.is_sparse else _as_rows(own), group)


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


def _agreed(
    gradient: torch.Tensor, policy: Policy, problem: str, group: Any, limit_bytes: int | None
) -> Literal["dense", "sparse"]:
    """The form that all ranks take. Raises ShardwrightError on all of them where they differ."""
    rows = gradient.shape[0] if gradient.dim() else 0
    entries = gradient.shape[1:].numel() if gradient.dim() else 0
    own = 0 if problem else gradient._nnz() if gradient.is_sparse else rows
    dtype = _DTYPES.index(gradient.dtype) if gradient.dtype in _DTYPES else -1
    limit = -1 if limit_bytes is None else limit_bytes
    told = [int(bool(problem)), rows, entries, dtype, POLICIES.index(policy) if policy in POLICIES else -1, limit, own]
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
    if policy != "auto":
        return policy
    of = RowGradient(rows, entries * gradient.element_size(), max(said[-1] for said in every), size)
    return of.chosen(limit_bytes)


def _as_rows(gradient: torch.Tensor) -> torch.Tensor:
    """A dense gradient as rows, those of zeros left out: they add nothing."""
    rows = gradient.flatten(1).ne(0).any(1).nonzero().T if gradient.dim() > 1 else gradient.ne(0).nonzero().T
    return torch.sparse_coo_tensor(rows, gradient[rows[0]], gradient.shape, is_coalesced=True, check_invariants=False)


def _gathered(gradient: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of coalesced rows of all ranks. A gather is of equal parts, so ranks with fewer rows fill up."""
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
