"""Trains models under several splits in one launch and compares every step with the plain, unsplit model.

Usage: equality.py [--all] OUT.json CASE...; a case is model:pp:dp:pipeline[:virtual_stages].
"""

import sys

import torch
import torch.distributed as dist
from launched import ALL, largest_share, leave
from models import batch, build

import shardwright.torch as sw
from shardwright.backends.torch.memory import weight_gradients
from tests.comparison import Comparison

weight_gradients.LARGE = 1  # gradients are added at once, as those of large models are
STEPS = 20
FEWER_STEPS = {"albert": 3, "mixtral": 3, "mixtral-balanced": 3, "windows": 5, "sinks": 3} | (
    {} if ALL else {"t5": 5, "llama": 5}
)
"""Models that are here for their shape: shared layers, experts, an encoder beside a decoder, projections apart."""
GLOBAL_MICROBATCHES = 4


class Reference:
    """The plain model over the same microbatches in the same order, with losses combined by equal weights."""

    def __init__(self, name: str) -> None:
        self.model = build(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, torch.Tensor | None]] = []
        for step in range(FEWER_STEPS.get(name, STEPS)):
            self.optimizer.zero_grad()
            total = 0.0
            whole = batch(name, step)
            for m in range(GLOBAL_MICROBATCHES):
                part = {key: tensor.chunk(GLOBAL_MICROBATCHES)[m] for key, tensor in whole.items()}
                loss = self.model(**part).loss
                (loss / GLOBAL_MICROBATCHES).backward()
                total += loss.item() / GLOBAL_MICROBATCHES
            self.losses.append(total)
            grads = {name: parameter.grad for name, parameter in self.model.named_parameters()}
            self.gradients.append({name: None if grad is None else grad.clone() for name, grad in grads.items()})
            # A bound that no gradient of these models reaches: the norm is compared, nothing is clipped.
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e6)))
            self.optimizer.step()


def run(case: str, reference: Reference) -> dict[str, object]:
    name, pp, dp, pipeline, virtual = [*case.split(":"), "1"][:5]
    microbatches = GLOBAL_MICROBATCHES // int(dp)
    sw.init(
        {
            "pipeline_parallel_degree": int(pp),
            "microbatches": microbatches,
            "pipeline": pipeline,
            "virtual_stages": int(virtual),
            "ddp": int(dp) > 1,
            "wait_timeout_s": 60.0,
        }
    )
    plain = build(name)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = sw.DistributedModel(plain)
    distributed = sw.DistributedOptimizer(optimizer)

    # Experts are given the tokens of all samples sorted, so what the loss is to its batch has to be said.
    reduction = "mean" if name == "mixtral" else None

    @sw.step
    def train_step(model, batch):
        loss = model(**batch).loss
        model.backward(loss, reduction=reduction)
        return loss

    same = Comparison(case)
    for step in range(len(reference.losses)):
        same.where = f"step {step}"
        distributed.zero_grad()
        whole = batch(name, step)
        own = {key: tensor.chunk(int(dp))[sw.dp_rank()] for key, tensor in whole.items()}
        loss = float(train_step(model, own).all_reduce_mean())
        same.losses(loss, reference.losses[step])
        held = {key: parameter.grad for key, parameter in model.local_named_parameters()}
        same.gradients(held, reference.gradients[step], part=True)
        same.losses(model.clip_grad_norm_(1e6), reference.norms[step], what="norms")
        distributed.step()
    state, final = model.state_dict(), reference.model.state_dict()
    same.values(state, final, relative=0.0, absolute=1e-4, what="weights")
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (same.report(), sum(p.numel() for p in model.local_parameters())))
    result = {
        "case": case,
        "same": [report for report, _ in every],
        "same_order": list(state) == list(final),
        "held": [size for _, size in every],
        "share": largest_share(model),
        "whole": sum(p.numel() for p in reference.model.parameters()),
        "largest": max(p.numel() for p in reference.model.parameters()),
    }
    sw.shutdown()
    return result


def main() -> None:
    dist.init_process_group("gloo")
    out, *cases = [given for given in sys.argv[1:] if given != "--all"]
    results = []
    references: dict[str, Reference] = {}
    for case in cases:
        name = case.split(":")[0]
        if name not in references:
            references[name] = Reference(name)
        results.append(run(case, references[name]))
    leave(results, out)


if __name__ == "__main__":
    main()
