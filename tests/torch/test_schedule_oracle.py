"""Torch's own schedules as the oracle: the order of every rank, strictly in length; and our CSV in torch's runtime."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.pipelining import schedules as upstream  # noqa: E402

from shardwright.core.schedule import Action, Schedule  # noqa: E402
from shardwright.core.schedule.files import from_csv, load_csv, save_csv  # noqa: E402
from shardwright.core.schedule.passes import insert_sharding, insert_transfers  # noqa: E402
from tests.comparison import Comparison  # noqa: E402

RANKS = (1, 2, 3, 4, 5, 8)


def stub_stages(rank: int, ranks: int, virtual_stages: int) -> list[Any]:
    """What torch's constructors read of a stage; nothing is run."""
    return [
        SimpleNamespace(
            stage_index=rank + chunk * ranks, num_stages=ranks * virtual_stages, group_size=ranks, group_rank=rank,
            submod=None, is_last=rank + chunk * ranks == ranks * virtual_stages - 1,
        )
        for chunk in range(virtual_stages)
    ]  # fmt: skip


def flattened(order: list[Any]) -> list[str]:
    """Torch's actions as text, without None and REDUCE_GRAD, overlapped pairs one after the other."""
    cells = []
    for action in order:
        if action is not None and action.computation_type != upstream.REDUCE_GRAD:
            cells += [repr(part) for part in action.sub_actions or (action,)]
    return cells


def ours(schedule: Schedule) -> list[list[str]]:
    return [[part.text for action in order for part in action.flat] for order in schedule.table]


def require_equal(schedule: Schedule, expected: list[list[str]]) -> None:
    for mine, theirs in zip(ours(schedule), expected, strict=True):
        for step, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            assert left == right, f"{schedule.arguments}: step {step}"


def sizes(ranks: int) -> list[int]:
    return sorted({1, 2, 3, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 3 * ranks, 4 * ranks + 2})


@pytest.mark.parametrize("ranks", RANKS)
def test_gpipe_has_torchs_order(ranks: int) -> None:
    for m in sizes(ranks):
        table = upstream.ScheduleGPipe(stub_stages(0, ranks, 1)[0], m).pipeline_order
        expected = [flattened(table[rank]) for rank in range(ranks)]
        require_equal(Schedule.build("gpipe", ranks=ranks, microbatches=m), expected)


class Recorder:
    """Stands where torch's stage does, and writes down in which order torch runs it."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = rank, ranks, rank, ranks
        self.is_last, self.trace = rank == ranks - 1, []

    def get_fwd_recv_ops(self, mb: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, mb: int, *args: Any, **kwargs: Any) -> None:
        self.trace.append(f"{self.stage_index}F{mb}")

    def backward_one_chunk(self, mb: int, **kwargs: Any) -> None:
        self.trace.append(f"{self.stage_index}B{mb}")

    def perform_reduce_grad(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("ranks", RANKS)
def test_1f1b_has_the_order_that_torch_executes(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream.Schedule1F1B, "_initialize_stage", lambda *args: None)
    for m in [m for m in sizes(ranks) if m >= ranks]:
        expected = []
        for rank in range(ranks):
            recorder = Recorder(rank, ranks)
            upstream.Schedule1F1B(recorder, m)._step_microbatches([()] * m, [{}] * m)
            expected.append(recorder.trace)
        require_equal(Schedule.build("1f1b", ranks=ranks, microbatches=m), expected)


MULTI = {
    "interleaved-1f1b": (upstream.ScheduleInterleaved1F1B, (1, 2, 3)),
    "looped-bfs": (upstream.ScheduleLoopedBFS, (1, 2, 3)),
    "interleaved-zb": (upstream.ScheduleInterleavedZeroBubble, (1, 2, 3)),
    "zbv": (upstream.ScheduleZBVZeroBubble, (2,)),
    "dualpipev": (upstream.ScheduleDualPipeV, (2,)),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MULTI)
def test_multi_stage_schedules_have_torchs_order(name: str, ranks: int) -> None:
    kind, virtual = MULTI[name]
    compared = 0
    for v in virtual:
        for m in sizes(ranks):
            try:
                tables = kind(stub_stages(0, ranks, v), m).pipeline_order
            except ValueError:
                with pytest.raises(ValueError, match="does not admit these sizes"):
                    Schedule.build(name, ranks=ranks, microbatches=m, virtual_stages=v)
                continue
            expected = [flattened(tables[rank]) for rank in range(ranks)]
            require_equal(Schedule.build(name, ranks=ranks, microbatches=m, virtual_stages=v), expected)
            compared += 1
    assert compared


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_h1_is_torchs_zero_bubble_with_one_stage_per_rank(ranks: int) -> None:
    for m in [m for m in sizes(ranks) if m % max(1, m // ranks) == 0]:
        tables = upstream.ScheduleInterleavedZeroBubble(stub_stages(0, ranks, 1), m).pipeline_order
        expected = [flattened(tables[rank]) for rank in range(ranks)]
        require_equal(Schedule.build("zb-h1", ranks=ranks, microbatches=m), expected)


def test_torch_reads_our_csv_and_we_read_torchs(tmp_path: Any) -> None:
    for name, (_, virtual) in MULTI.items():
        mine = Schedule.build(name, ranks=4, microbatches=8, virtual_stages=virtual[-1])
        path = tmp_path / f"{name}.csv"
        save_csv(mine, path)
        runtime = upstream._PipelineScheduleRuntime(stub_stages(0, 4, virtual[-1]), 8)
        runtime._load_csv(str(path))
        again = tmp_path / f"{name}-torch.csv"
        runtime._dump_csv(str(again), format="compute_only")
        assert from_csv(again.read_text()).digest == mine.digest
        lowered = tmp_path / f"{name}-lowered.csv"
        runtime._dump_csv(str(lowered), format="compute_comms")
        assert from_csv(lowered.read_text()).placement == mine.placement


@pytest.mark.parametrize("text", ["2F0", "11B307", "3I1", "0W2", "3SEND_F1", "1RECV_B0", "1UNSHARD", "2REDUCE_GRAD"])
def test_text_of_one_action_reads_the_same_in_both(text: str) -> None:
    assert repr(upstream._Action.from_str(text)) == text == Action.parse(text).text


def test_text_of_a_composite_reads_the_same_in_both() -> None:
    text = Action.parse("(0F3;3B1)").text
    assert repr(upstream._Action.from_str(text)) == text


def _train(rank: int, ranks: int, port: int, path: str, form: str, m: int, v: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    layers, data, target = _model(ranks * v), *_batch(m)
    placement = load_csv(path).placement
    held = [stage for stage in range(ranks * v) if placement[stage] == rank]
    stages = [
        torch.distributed.pipelining.PipelineStage(layers[stage], stage, ranks * v, torch.device("cpu"))
        for stage in held
    ]
    runtime = upstream._PipelineScheduleRuntime(stages, m, loss_fn=_loss, scale_grads=False)
    runtime._load_csv(path, format=form)
    losses: list[Any] = []
    has_first, has_last = held[0] == 0, ranks * v - 1 in held
    runtime.step(*((data,) if has_first else ()), target=target if has_last else None, losses=losses)
    grads = {stage: [p.grad.clone() for p in layers[stage].parameters()] for stage in held}
    results.put((rank, [float(x) for x in losses], {s: [g.tolist() for g in gs] for s, gs in grads.items()}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _model(stages: int) -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(stages))


def _batch(m: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * m, 6, generator=generator), torch.randn(2 * m, 6, generator=generator)


def _loss(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "v", "form"),
    [
        ("zb-h2", 1, "compute_only"),
        pytest.param("v-half", 2, "compute_only", marks=pytest.mark.slow),
        ("zbv", 2, "compute_comms"),
    ],
)
def test_our_csv_runs_in_torchs_runtime_with_the_same_loss_and_gradients(
    name: str, v: int, form: str, tmp_path: Any
) -> None:
    ranks, m = 2, 4
    schedule = Schedule.build(name, ranks=ranks, microbatches=m, virtual_stages=v)
    if form == "compute_comms":
        schedule = insert_transfers(insert_sharding(schedule))
    path = tmp_path / "schedule.csv"
    save_csv(schedule, path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=_train, args=(rank, ranks, port, str(path), form, m, v, results))
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        gathered = [results.get(timeout=90) for _ in workers]
        for worker in workers:
            worker.join(20)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
    layers, (data, target) = _model(ranks * v), _batch(m)
    expected = []
    for inputs, wanted in zip(data.chunk(m), target.chunk(m), strict=True):
        for layer in layers:
            inputs = layer(inputs)
        loss = _loss(inputs, wanted)
        loss.backward()
        expected.append(loss.item())
    losses = next(found for _, found, _ in gathered if found)
    assert losses == pytest.approx(expected, rel=1e-6)
    seen = {}
    for _, _, grads in gathered:
        seen.update(grads)
    assert sorted(seen) == list(range(ranks * v))
    wanted = {stage: [parameter.grad for parameter in layers[stage].parameters()] for stage in seen}
    found = {stage: [torch.tensor(mine) for mine in of_stage] for stage, of_stage in seen.items()}
    Comparison().gradients(found, wanted).require()
