"""The comparison of the ranks of a run in every step; `start_agreement` has that of its start."""

from collections.abc import Sequence
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch

from shardwright.backends.torch.machine.agreement import Among, Claim
from shardwright.backends.torch.machine.digests import digest_of, fingerprint
from shardwright.backends.torch.state.model_agreement import plain_text
from shardwright.core.plan.file import to_document
from shardwright.core.plan.plan import Plan
from shardwright.torch.model_run import ModelRun
from shardwright.torch.session import Session


def mode_claim() -> Claim:
    """The claim of torch's own settings while the step runs."""
    autocast = [
        f"autocast of {kind} to {torch.get_autocast_dtype(kind)}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    grad = "gradients on" if torch.is_grad_enabled() else "gradients off"
    if torch.is_inference_mode_enabled():
        grad = "inference mode"
    precision = torch.get_float32_matmul_precision()
    value = ", ".join([grad, *autocast, f"{torch.get_default_dtype()} by default", f"products in {precision}"])
    return Claim.of("the mode of torch", value, "Enter torch.no_grad, torch.autocast and the like on every rank.")


def plan_claim(plan: Plan | None) -> Claim:
    """The claim of the plan that a model is wrapped under."""
    said = {"the plan": "given" if plan is not None else "not given"}
    if plan is not None:
        document = to_document(plan)
        said |= {f"{name} of the plan": str(value) for name, value in document["decision"].items()}
        said["the rest of the plan"] = f"{digest_of(str(document)) & 0xFFFFFFFF:08x}"
    return Claim.of("the plan of the model", said, "Give every rank the same plan.")


def model_claim(run: ModelRun) -> Claim:
    """The claim of the model, of several, that a step runs."""
    return Claim.of("the model of the step", run.label, "Pass the same model to the step on every rank.")


def session_claims(session: Session, run: ModelRun) -> list[Claim]:
    """The claims of the seed, the number of steps, the schedule and the optimizers of a model, and the state dicts
    loaded since the start."""
    runtime = run.runtime
    fix = "Call sw.set_seed, or pass seed to sw.init, with the same number on every rank."
    claims = [
        Claim.of("the seed", str(run.seed), fix),
        Claim.of(
            "the number of training steps so far", str(runtime.split_model.steps_run),
            "Run the same steps on every rank.",
        ),
        Claim.of(
            "the schedule", runtime.schedule_text, "Call model.use_schedule with the same schedule on every rank."
        ),
        Claim.of(
            "what was loaded since the start", session.loaded,
            "Every rank loads the same whole state dicts.",
        ),
    ]  # fmt: skip
    return [*claims, optimizers_claim(run)]


def optimizers_claim(run: ModelRun) -> Claim:
    """The claim of the settings of all optimizers of a model, and of the number of times that each was stepped."""
    fix = "Every rank makes the same optimizer, with the same settings, and steps it as often."
    return Claim.of("the optimizers", run.optimizers_said(), fix)


def batch_claims(
    names: Sequence[str], leaves: Sequence[Any], whole: Sequence[int], session: Session, *, in_full: bool
) -> list[Claim]:
    """The claims of the arguments of a step.

    Args:
        names: of each leaf, the place in the arguments.
        whole: the positions of tensors that every microbatch gets whole.
        in_full: see `digests`.
    """
    bound, config = session.bound, session.config
    tensors = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    digests = [fingerprint(leaf, in_full=in_full) for _, leaf in tensors]
    alike = "all ranks of a replica (its pp and tp peers) are given the same batch"
    if not config.prescaled_batch:
        alike = "pipeline peers are given the same batch, and tensor-parallel peers as many samples of the same size"
    fix = f"{alike[0].upper()}{alike[1:]}; sw.sampler(dataset) does that."
    if bound.size("tp") > 1 and config.prescaled_batch:
        fix += (
            " With a tensor axis sw.dp_rank() differs between ranks of one replica, as it is rdp_rank · tp_size + "
            "tp_rank: shard and seed the data by sw.rdp_rank() of sw.rdp_size(), or set 'prescaled_batch': False."
        )
    among: Among = "replica" if config.prescaled_batch else "pipeline"
    contents = partial(_contents, [name for name, _ in tensors], digests)
    claims = [
        Claim.of("the arguments", dict(zip(names, map(_argument_text, leaves), strict=True)), fix, "replica"),
        Claim("the contents of the batch", digest_of(*digests), contents, fix, among),
    ]
    if bound.size("tp") > 1 and not config.prescaled_batch and whole:
        shared = [fingerprint(leaves[position], in_full=in_full) for position in whole]
        fix = (
            "A step runs on the samples of all tensor-parallel peers, with one value of what is not split into "
            "microbatches: give these ranks the same, as a count of the samples of all of them."
        )
        held = partial(_contents, [names[position] for position in whole], shared)
        claims.append(Claim("what every microbatch gets whole", digest_of(*shared), held, fix, "replica"))
    return claims


def _argument_text(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        said = f"of type {leaf.dtype} with contents {crc32(leaf.tobytes()):08x}"
        return f"an array {leaf.shape} {said}" if leaf.shape else f"{leaf!r} {said}"
    if not isinstance(leaf, torch.Tensor):
        return plain_text(leaf) or f"a {type(leaf).__name__}"
    text = f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
    return f"{text}, with a gradient" if leaf.requires_grad else text


def _contents(names: Sequence[str], digests: Sequence[int]) -> dict[str, str]:
    return {name: f"{digest & 0xFFFFFF:06x}" for name, digest in zip(names, digests, strict=True)}
