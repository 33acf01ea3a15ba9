"""Trains models under several splits in one launch and compares every step with the plain, unsplit model.

Usage: equality.py OUT.json CASE...; a case is model:pp:dp:pipeline[:virtual_stages].
"""

import sys

import torch
import torch.distributed as dist
from launched import leave
from models import batch, build

import shardwright.torch as sw

STEPS = 20
FEWER_STEPS = {"albert": 3, "mixtral": 3}
"""Models that are here for their shape: shared layers, experts."""
GLOBAL_MICROBATCHES = 4


class Reference:
    """The plain model over the same microbatches in the same order, with losses combined by equal weights."""

    def __init__(self, name: str) -> None:
        self.model = build(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
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
            self.gradients.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
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

    @sw.step
    def train_step(model, batch):
        loss = model(**batch).loss
        model.backward(loss)
        return loss

    worst_loss, worst_gradient, worst_norm = 0.0, 0.0, 0.0
    missing: list[str] = []
    for step in range(len(reference.losses)):
        distributed.zero_grad()
        whole = batch(name, step)
        own = {key: tensor.chunk(int(dp))[sw.dp_rank()] for key, tensor in whole.items()}
        loss = float(train_step(model, own).reduce_mean())
        worst_loss = max(worst_loss, abs(loss - reference.losses[step]) / abs(reference.losses[step]))
        expected = reference.gradients[step]
        everything = torch.stack([g.norm() for g in expected.values()]).norm()
        for key, parameter in model.local_named_parameters():
            if (parameter.grad is None) != (key not in expected):
                missing.append(key)
                continue
            if parameter.grad is None:
                continue
            allowed = 1e-4 * expected[key].norm() + 1e-6 * everything
            worst_gradient = max(worst_gradient, float((parameter.grad - expected[key]).norm() / allowed))
        norm = float(model.clip_grad_norm_(1e6))
        worst_norm = max(worst_norm, abs(norm - reference.norms[step]) / reference.norms[step])
        distributed.step()
    state = model.state_dict()
    final = reference.model.state_dict()
    same_names = list(state) == list(final)
    state_error = max(float((state[k].float() - final[k].float()).abs().max()) for k in final)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([sum(p.numel() for p in model.local_parameters())]))
    result = {
        "case": case,
        "loss": worst_loss,
        "gradient": worst_gradient,
        "norm": worst_norm,
        "missing": missing,
        "same_names": same_names,
        "state_error": state_error,
        "held": [int(size) for size in sizes],
        "whole": sum(p.numel() for p in reference.model.parameters()),
        "largest": max(p.numel() for p in reference.model.parameters()),
    }
    sw.shutdown()
    return result


def main() -> None:
    dist.init_process_group("gloo")
    results = []
    references: dict[str, Reference] = {}
    for case in sys.argv[2:]:
        name = case.split(":")[0]
        if name not in references:
            references[name] = Reference(name)
        results.append(run(case, references[name]))
        every: list[torch.Tensor] = [torch.zeros(3, dtype=torch.float64) for _ in range(dist.get_world_size())]
        own = torch.tensor([results[-1][k] for k in ("loss", "gradient", "norm")], dtype=torch.float64)
        dist.all_gather(every, own)
        worst = torch.stack(every).max(dim=0).values.tolist()
        results[-1].update(zip(("loss", "gradient", "norm"), worst, strict=True))
    leave(results, sys.argv[1])


if __name__ == "__main__":
    main()
