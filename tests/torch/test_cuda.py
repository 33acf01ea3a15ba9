"""On CUDA devices: predicted memory against the allocator, profiles, and sharded state, 16 bits and sums beside the
backward against torch alone."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from shardwright.backends.torch.machine.profile import profile
from shardwright.backends.torch.memory.fp8_linear import CAPABILITY, linear
from shardwright.backends.torch.memory.offload import Offload, Trip
from shardwright.measure import measure_units
from tests import fp8_by_hand as by_hand
from tests.comparison import Comparison
from tests.torch.launch import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Module is None")]

BATCH, SEQUENCE, VOCABULARY, MICROBATCHES = 8, 512, 8192, 4
PINS = {"microbatch": BATCH, "precision": "fp32", "recompute": "none", "shard": 0, "pp": 1, "tp": 1, "dp": 1}


def gpt2(dropout: float) -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=4, n_embd=512, n_head=8, vocab_size=VOCABULARY, n_positions=SEQUENCE, bos_token_id=0,
            eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    ).train()  # fmt: skip


def batch(device: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), device=device)
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_allocators_peak_is_predicted(dropout: float) -> None:
    layer, left = torch.nn.Linear(64, 64, device="cuda"), torch.randn(64, 64, device="cuda", requires_grad=True)
    (left @ layer(left)).sum().backward()  # makes the workspaces of the library, which are no model's
    del layer, left
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model, given = gpt2(dropout).cuda(), batch("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(2):  # the second has gradients and states of the first
        if step:
            torch.cuda.reset_peak_memory_stats()
        model(**given).loss.backward()
        optimizer.step()
    measured = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before  # allocated are whole blocks
    plan = sw.plan(sw.capture(model, given), sw.Cluster("a100-80gb"), batch=2 * BATCH, **PINS)
    assert measured <= plan.predicted.peak_memory_bytes[0] <= 1.03 * measured


def test_a_profile_has_every_precision_and_the_units_of_a_model() -> None:
    """How near steps come to it is measured by `benchmarks/gpu_steps.py`."""
    measured = profile(name="here", budget_s=10.0)
    assert measured.kind == "gpu"
    assert {p.precision for p in measured.products} == {"fp32", "bf16", "fp16"}
    here = measured.profile()
    model, given = gpt2(0.0), batch("cpu")
    units = measure_units(model, given, microbatches=(BATCH,), cluster=sw.Cluster(here), steps=10)
    cluster = sw.Cluster(replace(here, device=replace(here.device, measured_units=units)))
    plan = sw.plan(sw.capture(model, given), cluster, batch=MICROBATCHES * BATCH, **PINS)
    assert plan.predicted.error.basis == "profiled with the model"
    assert units[0].forward_s > 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sharded_state_16_bits_and_sums_beside_the_backward(ranks: int, tmp_path: Path) -> None:
    """Every level of sharding in fp32, bf16 and fp16, two in fp8, state on the host: a process a device, NCCL."""
    there = torch.cuda.device_count()
    if ranks > there:
        pytest.skip(f"needs {ranks} CUDA devices, and there are {there}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(there)))
    out = tmp_path / "out.json"
    outcome = torchrun("on_device.py", ranks, "cuda", str(out), extra={"CUDA_VISIBLE_DEVICES": visible})
    assert outcome.code == 0, outcome.text[-4000:]
    reports = json.loads(out.read_text())
    assert len(reports) == (18 if torch.cuda.get_device_capability() >= CAPABILITY else 16)
    for report in reports:
        Comparison.of_ranks([report]).require("losses", "gradients")


@pytest.mark.parametrize("shape", [(256, 512, 128), (34, 48, 80), (7, 24, 40)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_products_in_fp8_are_those_by_hand(shape: tuple[int, int, int], is_turned: bool) -> None:
    """Within 1/64 of the largest entry: cuBLAS keeps sums in fewer bits."""
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("needs a device with products in fp8")
    n, k, m = shape
    random = torch.Generator("cuda").manual_seed(0)
    rows, weight, gradient = (
        torch.randn(*size, generator=random, device="cuda").to(torch.bfloat16) for size in ((n, k), (m, k), (n, m))
    )
    wanted = by_hand.linear(*(t.double().cpu().numpy() for t in (rows, weight, gradient)))
    x, w = rows.clone().requires_grad_(), (weight.t() if is_turned else weight).contiguous().requires_grad_()
    made = linear(x, w, is_turned=is_turned)
    made.backward(gradient)
    found = made.detach(), x.grad, w.grad.t() if is_turned else w.grad
    for name, got, value in zip(("product", "rows", "weight"), found, wanted, strict=True):
        near = {"relative": 2.0**-7, "absolute": float(abs(value).max()) / 64}
        Comparison(name).values(got.double().cpu().numpy(), value, **near).require()


def test_what_is_not_finite_is_not_lost_in_fp8() -> None:
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("needs a device with products in fp8")
    for bad in (float("inf"), float("nan")):
        for where in range(3):
            operands = [torch.ones(32, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            operands[where][3, 5] = bad
            x, w = operands[0].requires_grad_(), operands[1].requires_grad_()
            made = linear(x, w)
            made.backward(operands[2])
            read = {0: (made, w.grad), 1: (made, x.grad), 2: (x.grad, w.grad)}[where]
            assert not any(result.isfinite().all() for result in read)


def test_activations_go_to_pinned_memory_and_come_back() -> None:
    """A chain of blocks on the host: the gradients of plain autograd, and less on the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    block = [torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)]
    chain = torch.nn.ModuleList(torch.nn.Sequential(*copy.deepcopy(block)) for _ in range(6)).to(device)
    given = torch.randn(2048, 1024, device=device)

    def run(away: bool) -> tuple[list[torch.Tensor], int]:
        chain.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        offload = Offload(frozenset({("block", 0)}), device)
        x = given.clone().requires_grad_()
        trip: Trip | None = None
        for block in chain:
            if away:
                with offload.sending("block", block, [x], trip) as trip:
                    x = x + block(x)
            else:
                x = x + block(x)
        x.square().mean().backward()
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        return [p.grad.clone() for p in chain.parameters()], peak  # type: ignore[union-attr]

    for _ in range(2):  # the second takes memory that the first let go of
        kept, most = run(False)
        found, least = run(True)
        assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))
        assert least < 0.7 * most
