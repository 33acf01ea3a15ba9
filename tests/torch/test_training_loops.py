"""Hugging Face's `Trainer`, Accelerate and Lightning over a split model: what they do in one process."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.compat import broadcast_masks
from tests.comparison import Comparison
from tests.torch.launch import ROOT, WORKERS, Outcome, run

pytestmark = pytest.mark.timeout(600)
PIPELINE = {"partitions": 2, "microbatches": 4}
TENSOR = {"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 2}
SHARDED = {"partitions": 1, "sharded_data_parallel_degree": 2, "ddp": True, "sdp_param_persistence_threshold": 10}
REPLICAS = {"partitions": 2, "ddp": True, "microbatches": 2}
PIECES = {"tensor_parallel_degree": 2, "microbatches": 2}
SHARDS = {"ddp": True, "shard": 3, "microbatches": 2}
FRAMEWORK = {"SM_FRAMEWORK_PARAMS": '{"sagemaker_mpi_enabled": true}'}


def torchrun(processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def results(outcome: Outcome, folder: Path) -> Any:
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))


def trainer(kind: str, folder: Path, batch: int = 8, *more: str, **extra: str) -> Any:
    """The log of a run in one process."""
    command = [sys.executable, str(WORKERS / "loop_trainer.py"), kind, str(folder), str(batch), *more]
    return results(run(command, 90, extra), folder)


def split_trainer(
    kind: str, folder: Path, processes: int, keys: dict[str, Any], batch: int = 8, *more: str, **extra: str
) -> Any:
    """The log of a run over several."""
    script = ["-m", "shardwright.compat", str(WORKERS / "loop_trainer.py")]
    given = {"SM_HP_MP_PARAMETERS": json.dumps(keys)} | FRAMEWORK | extra
    command = [*torchrun(processes), *script, kind, str(folder), str(batch), *more]
    return results(run(command, 90, given), folder)


def column(log: Any, key: str) -> list[float]:
    return [entry[key] for entry in log if key in entry]


def require_equal(found: Any, expected: Any, losses: int = 20) -> None:
    for key in ("loss", "grad_norm", "eval_loss", "eval_sum"):
        one, other = column(found, key), column(expected, key)
        assert len(one) == len(other) == (losses if key in ("loss", "grad_norm") else 2)
        Comparison(key).losses(one, other).require()
    assert column(found, "learning_rate") == column(expected, "learning_rate")
    assert column(found, "eval_size") == column(expected, "eval_size")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder and the log of a run of `Trainer` in one process, by the model's kind, each made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp("plain") / kind
            made[kind] = folder, trainer(kind, folder)
        return made[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "processes", "keys", "batch"),
    [
        pytest.param("bert", 2, PIPELINE, 8, marks=pytest.mark.slow, id="bert-pp2"),
        pytest.param("gpt2", 2, TENSOR, 4, id="gpt2-tp2"),
        pytest.param("bert", 2, SHARDED, 4, marks=pytest.mark.slow, id="bert-sharded2"),
        pytest.param("gpt2", 4, REPLICAS, 4, marks=pytest.mark.slow, id="gpt2-pp2-dp2"),
        pytest.param("bert", 4, TENSOR | {"partitions": 2}, 4, marks=pytest.mark.slow, id="bert-pp2-tp2"),
    ],
)
def test_trainer_trains_as_in_one_process(
    kind: str, processes: int, keys: dict[str, Any], batch: int, plain: Any, tmp_path: Path
) -> None:
    """20 updates over two batches each, of which labels are left out, with evaluation and clipped gradients."""
    require_equal(split_trainer(kind, tmp_path / "out", processes, keys, batch), plain(kind)[1])


def test_trainer_resumes_under_another_split(plain: Any, tmp_path: Path) -> None:
    """A checkpoint of one process in two, and theirs in one."""
    folder, expected = plain("gpt2")
    split = tmp_path / "split"
    require_equal(split_trainer("gpt2", split, 2, PIPELINE, 8), expected)
    again = split_trainer("gpt2", tmp_path / "again", 2, SHARDED, 4, str(folder / "checkpoint-10"))
    require_equal(again, expected)
    require_equal(trainer("gpt2", tmp_path / "one", 8, str(split / "checkpoint-10")), expected)
    there = {one.name for one in (tmp_path / "again" / "checkpoint-20").iterdir()}
    assert there >= {one.name for one in (folder / "checkpoint-20").iterdir()} - {"rng_state.pth"}
    assert there >= {"rng_state_0.pth", "rng_state_1.pth"}, "one for each share of the data"


@pytest.mark.slow
def test_trainer_smooths_labels_and_loads_the_best_model(tmp_path: Path) -> None:
    extra = {"ASKED": json.dumps({"label_smoothing_factor": 0.1, "load_best_model_at_end": True}), "first": "1"}
    expected = trainer("gpt2", tmp_path / "plain", 8, **extra)
    found = split_trainer("gpt2", tmp_path / "split", 2, PIPELINE, 8, **extra)
    Comparison("before training").losses([found[0]["eval_loss"]], [expected[0]["eval_loss"]]).require()
    require_equal(found[1:], expected[1:])


def lightning(kind: str, folder: Path, processes: int, keys: dict[str, Any] | None, batch: int, *more: str) -> Any:
    config = "-" if keys is None else json.dumps(keys)
    script = [str(WORKERS / "loop_lightning.py"), kind, str(folder), str(batch), config, *more]
    command = [sys.executable] if processes == 1 else torchrun(processes)
    return results(run([*command, *script], 90), folder)


@pytest.mark.parametrize(
    ("kind", "keys", "batch"),
    [
        pytest.param("gpt2", {"pipeline_parallel_degree": 2, "microbatches": 4}, 8, id="gpt2-pp2"),
        pytest.param("bert", PIECES, 8, marks=pytest.mark.slow, id="bert-tp2"),
        pytest.param("bert", SHARDS, 4, marks=pytest.mark.slow, id="bert-sharded2"),
    ],
)
def test_lightning_trains_and_resumes_as_in_one_process(
    kind: str, keys: dict[str, Any], batch: int, tmp_path: Path
) -> None:
    plain, split = tmp_path / "plain", tmp_path / "split"
    expected = lightning(kind, plain, 1, None, 8)
    found = lightning(kind, split, 2, keys, batch)
    assert len(found["losses"]) == 40
    for key in ("losses", "validation"):
        Comparison(key).losses(found[key], expected[key]).require()
    # Lightning begins its loaders anew: what two resumed runs do is the same, and not what one run would have done.
    one = lightning(kind, tmp_path / "one", 1, None, 8, str(split / "step=10.ckpt"))
    two = lightning(kind, tmp_path / "two", 2, keys, batch, str(plain / "step=10.ckpt"))
    assert len(one["losses"]) == 20
    Comparison("resumed").losses(two["losses"], one["losses"]).require()


@pytest.mark.parametrize(
    ("kind", "keys", "batch"),
    [
        pytest.param("gpt2", {"pipeline_parallel_degree": 2, "microbatches": 4}, 8, id="gpt2-pp2"),
        pytest.param("bert", SHARDS, 4, marks=pytest.mark.slow, id="bert-sharded2"),
    ],
)
def test_accelerate_trains_as_in_one_process(kind: str, keys: dict[str, Any], batch: int, tmp_path: Path) -> None:
    script = str(WORKERS / "loop_accelerate.py")
    plain, split, back = tmp_path / "plain", tmp_path / "split", tmp_path / "back"
    expected = results(run([sys.executable, script, kind, str(plain), "8", "-"], 90), plain)
    command = [*torchrun(2), script, kind, str(split), str(batch), json.dumps(keys)]
    if "ddp" in keys:  # of two replicas, where schedulers have counted twice as often
        outcome = run([*command, str(plain / "state")], 90)
        assert "saved where 1 ranks took different batches, and here 2 do" in outcome.text
        found = results(run(command, 90), split)
    else:
        found = results(run([*command, str(plain / "state")], 90), split)
        of_split = results(run([sys.executable, script, kind, str(back), "8", "-", str(split / "state")], 90), back)
        Comparison("back in one process").losses(of_split["losses after"], expected["losses after"]).require()
    assert len(found["losses"]) == 20
    assert len(found["predicted"]) == 18
    for key in ("losses", "norms", "predicted", "rate", "losses after", "norms after", "rate after"):
        Comparison(key).losses(found[key], expected[key]).require()
    assert found["state"] == pytest.approx(expected["state"], rel=0, abs=1e-5)  # some gradients are 0 but for rounding


def said_by(code: str, **environment: str) -> str:
    """The last line of what a program writes, which fails."""
    outcome = run([sys.executable, "-c", code], 60, environment)
    assert outcome.code != 0, outcome.text[-2000:]
    return outcome.text.strip().splitlines()[-1]


def test_what_trainer_cannot_carry_out_is_refused() -> None:
    begin = "from shardwright.compat.trainer import Trainer, TrainingArguments\n"
    given = {"SM_HP_MP_PARAMETERS": '{"partitions": 1}'} | FRAMEWORK
    assert "sagemaker_mpi_enabled" in said_by(f"{begin}TrainingArguments('out')")
    code = f"""{begin}
import torch, transformers, shardwright.torch as sw
from shardwright.core.errors import MissingCapabilityError
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8))
for name, value in (("fp16", True), ("auto_find_batch_size", True), ("neftune_noise_alpha", 1.0)):
    args = TrainingArguments("out", report_to=[])
    setattr(args, name, value)
    try:
        Trainer(model, args)
    except MissingCapabilityError as error:
        assert name in str(error), error
    else:
        raise SystemExit(name)
raise SystemExit("all refused")
"""
    assert said_by(code, **given) == "all refused"
    code = """
import shardwright.compat
shardwright.compat.install()
import transformers.trainer_pt_utils as utils
utils.smp_forward_backward(None, {})
"""
    assert "shardwright.compat.trainer" in said_by(code, **given)


def test_what_the_others_cannot_carry_out_is_refused() -> None:
    code = """
import torch, lightning.pytorch as pl, shardwright.torch as sw
from shardwright.compat.accelerate import Accelerator
from shardwright.compat.lightning import _require_possible
from lightning.pytorch.plugins.precision import Precision, DoublePrecision
from shardwright.core.errors import ShardwrightError
from shardwright.torch.output import StepOutput
class Manual(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
class Own(pl.LightningModule):
    def optimizer_zero_grad(self, *given): ...
class Fine(pl.LightningModule): ...
model = torch.nn.Linear(2, 2)
def prepared():
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(2, 2))
    return accelerator
cases = [
    ("automatic_optimization", lambda: _require_possible(Manual(), Precision())),
    ("optimizer_zero_grad", lambda: _require_possible(Own(), Precision())),
    ("DoublePrecision", lambda: _require_possible(Fine(), DoublePrecision())),
    ("mixed_precision", lambda: Accelerator(mixed_precision="bf16")),
    ("no model was prepared", lambda: Accelerator().backward(torch.ones(()))),
    ("output_dir", lambda: Accelerator().save_state()),
    ("map_location", lambda: prepared().load_state("out", map_location="cpu")),
    ("lacks random_states_0.pkl", lambda: prepared().load_state("out")),
    ("reduce_mean", lambda: Accelerator().reduce(StepOutput([torch.ones(())]), "sum")),
    ("0 of the model's 2 parameters", lambda: prepared().clip_grad_norm_(model.parameters(), 1.0)),
    ("takes tensors", lambda: Accelerator().gather_for_metrics(["text"])),
]
for said, call in cases:
    try:
        call()
    except ShardwrightError as error:
        assert said in str(error), (said, error)
    else:
        raise SystemExit(said)
raise SystemExit("all refused")
"""
    assert said_by(code) == "all refused"


def test_they_are_loaded_where_they_are_asked_for() -> None:
    code = "import sys, shardwright.compat, shardwright.torch; print([n for n in ('transformers', 'accelerate', 'lightning') if n in sys.modules])"  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_trainer_of_releases_4_takes_its_own_batch_and_decays_by_name() -> None:
    """What releases 4 do by themselves stands in the place of `transformers.Trainer`: they take a checkpoint's batch,
    and the names of the wrapped model's parameters."""
    code = """
        from types import SimpleNamespace

        import torch
        import transformers
        from shardwright.compat.trainer import Trainer

        def create_optimizer(self):
            decayed = {name for name, p in self.model.named_parameters() if p.dim() > 1}
            of_wrapped = dict(self.model_wrapped.named_parameters())
            groups = [
                {"params": [p for name, p in of_wrapped.items() if name in decayed], "weight_decay": 0.1},
                {"params": [p for name, p in of_wrapped.items() if name not in decayed], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.SGD(groups, lr=0.1)

        transformers.Trainer.create_optimizer = create_optimizer
        transformers.Trainer._inner_training_loop = lambda self, batch_size=None, **more: (batch_size, more)
        trainer = Trainer.__new__(Trainer)
        trainer.args, trainer.optimizer = SimpleNamespace(train_batch_size=4), None
        assert trainer._inner_training_loop(64, resume_from_checkpoint="a") == (4, {"resume_from_checkpoint": "a"})
        trainer.model = torch.nn.Linear(2, 3)
        trainer.model_wrapped = wrapped = torch.nn.Sequential(trainer.model)
        groups = trainer.create_optimizer().param_groups
        assert [[p.dim() for p in group["params"]] for group in groups] == [[2], [1]], groups
        assert trainer.model_wrapped is wrapped
    """
    outcome = run([sys.executable, "-c", textwrap.dedent(code)], 90)
    assert outcome.code == 0, outcome.text[-4000:]


def test_masks_of_indices_that_broadcast_are_those_of_mapped_functions() -> None:
    """As releases 4 of transformers map a mask's function over each sample, head, query and key."""
    padding, chunks = torch.rand(3, 7, generator=torch.Generator().manual_seed(0)) > 0.3, torch.arange(7) // 3

    def causal(sample: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query.new_ones((), dtype=torch.bool) & (key <= query + 2)

    def padded(sample: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return causal(sample, head, query, key) & padding[sample, key] & (chunks[query] == chunks[key])

    samples, heads, queries, keys = (torch.arange(count) for count in (3, 1, 5, 7))
    for function in (causal, padded):
        found = broadcast_masks.over_all_indices(function)(samples, heads, queries, keys)
        wanted = [[[[bool(function(b, h, q, k)) for k in keys] for q in queries] for h in heads] for b in samples]
        Comparison("masks").equal(found, torch.tensor(wanted)).require()
    found = broadcast_masks.over_all_indices(causal, bh_indices=False)(None, None, queries, keys)
    wanted = [[bool(causal(None, None, q, k)) for k in keys] for q in queries]
    Comparison("masks of no samples").equal(found, torch.tensor(wanted)).require()
