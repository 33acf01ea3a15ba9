"""SageMaker's module names."""

import enum
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.compat
import shardwright.torch as sw
from shardwright.compat import keys, modelparallel, names
from shardwright.core.errors import MissingCapabilityError, PlanWarning, ShardwrightError
from shardwright.torch import config
from shardwright.torch.config import read_config
from tests.comparison import Comparison
from tests.torch.launch import ROOT, WORKERS, on_ranks, run

SCRIPT = WORKERS / "sagemaker_script.py"


def launch(processes: int, out: Path, **keys: object) -> list[dict[str, list[float]]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    outcome = run(
        [*command, "-m", "shardwright.compat", str(SCRIPT), str(out)], 90,
        {"SM_HP_MP_PARAMETERS": json.dumps({"ddp": True, "microbatches": 2, **keys})},
    )  # fmt: skip
    assert outcome.code == 0, outcome.text[-4000:]
    found: list[dict[str, list[float]]] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.timeout(600)
def test_a_script_runs_with_no_line_changed(tmp_path: Path) -> None:
    """On one process, and on four as two stages of two replicas, which lie as D, P, T."""
    out = tmp_path / "out.json"
    ((plain),) = launch(1, out)
    split = launch(4, out, partitions=2)
    assert [one["place"] for one in split] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    means = [sum(one["losses"][step] for one in split) / 4 for step in range(3)]
    Comparison("losses").losses(means, plain["losses"]).require()


@pytest.mark.timeout(600)
def test_only_the_batch_of_pipeline_rank_0_counts() -> None:
    outcome = on_ranks("first_stage.py", 4, timeout_s=90)
    assert outcome.code == 0, outcome.text[-4000:]
    assert "all checked" in outcome.text


@pytest.mark.parametrize("name", names.NAMES, ids=lambda one: one.name)
def test_every_name_is_there_or_refused_by_name(name: names.Name) -> None:
    inside, _, last = name.name.rpartition(".")
    at = functools.reduce(getattr, inside.split(".") if inside else (), modelparallel)
    assert names.MEANS[name.name]
    if inside in ("StepOutput", "DistributedModel", "DistributedOptimizer"):
        of_instances = {"StepOutput.outputs", "DistributedOptimizer.overflow"}
        assert hasattr(at, last) or name.name in of_instances
        return
    if name.state == "refused":
        with pytest.raises(AttributeError, match=f"smdistributed.modelparallel.torch.{name.name}: .*[a-z]"):
            getattr(at, last)
        assert inside or not hasattr(sw, name.name), "it is there: say so in the list of names"
        return
    if name.name != "state.cfg":  # which a run has
        found = getattr(at, last)
        assert inside or found.__module__.startswith("shardwright.compat") or found is getattr(sw, name.name)
    assert (name.state == "other") == bool(name.says)


def test_what_is_in_modules() -> None:
    assert modelparallel.amp.GradScaler is torch.amp.GradScaler
    assert isinstance(modelparallel.nn.FusedLayerNorm(4), torch.nn.LayerNorm)
    modelparallel.init({"microbatches": 2})
    modelparallel.init({"microbatches": 3})  # once more before there is a model, as transformers and scripts do
    assert modelparallel.state.cfg.microbatches == 3
    assert modelparallel.state.cfg.placement_strategy == "cluster"
    modelparallel.DistributedModel(torch.nn.Linear(1, 1))
    with pytest.raises(ShardwrightError, match="init was called twice"):
        modelparallel.init({})
    sw.shutdown()
    with pytest.raises(AttributeError, match=r"nn\.DistributedTransformr: did you mean 'nn\.DistributedTransformer'"):
        _ = modelparallel.nn.DistributedTransformr
    assert dir(modelparallel.amp) == ["GradScaler"]


CONFIG_NAMES = {"partitions": "pipeline_parallel_degree", "sdp_hierarchical_allgather": "hierarchical_gathers"}


@pytest.mark.parametrize("key", keys.KEYS, ids=lambda one: one.name)
def test_every_key_acts_or_says_that_it_does_not(key: keys.Key) -> None:
    beside = {"ddp": True} if key.name != "ddp" else {}
    if key.name.startswith("sdp_"):
        beside["sharded_data_parallel_degree"] = 2
    if key.name == "activation_loading_horizon":
        beside["offload_activations"] = True
    if key.name == "default_partition":
        beside |= {"auto_partition": False, "partitions": 2}
    if key.state == "fixed":
        with pytest.raises(ShardwrightError, match=f"{key.name}={key.example!r}"):
            read_config({key.name: key.example})
        read_config({key.name: key.default})
    elif key.state == "none":
        with pytest.warns(UserWarning, match=f"{key.name} has no effect"):
            assert read_config({key.name: key.example}) == read_config({})
    else:
        assert (
            getattr(read_config({key.name: key.example, **beside}), CONFIG_NAMES.get(key.name, key.name)) == key.example
        )


def test_the_table_of_keys_is_whole() -> None:
    named = set(keys.BY_KEY)
    assert config._WITHOUT_EFFECT | set(config._LATER) | set(config._ALIASES) <= named
    assert keys.table() in (ROOT / "docs" / "sagemaker.md").read_text(encoding="utf-8")


def test_defaults_are_sagemakers() -> None:
    modelparallel.init({"sharded_data_parallel_degree": 1})
    held = modelparallel.state.cfg
    assert (held.pipeline, held.placement_strategy, held.prescaled_batch) == ("interleaved", "cluster", False)
    assert held.sdp_gradient_clipping is None
    sw.shutdown()
    asked: list[dict[str, object]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sw, "init", lambda given, plan: asked.append({**given, "plan": plan}))
        modelparallel.init({"tensor_parallel_degree": 2}, sharded_data_parallel_degree=4, pipeline="1f1b")
        modelparallel.init({"offload_activations": True, "activation_loading_horizon": 2})
        modelparallel.init(plan="plan.json")
    first, second, planned = asked
    assert planned == {"plan": "plan.json", "prescaled_batch": False}
    assert (first["optimize"], first["sdp_gradient_clipping"], first["pipeline"]) == ("memory", 1.0, "1f1b")
    assert second["activation_loading_horizon"] == 2


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'DistributedModel'"):
        _ = modelparallel.DistributedModle
    assert set(dir(modelparallel)) >= {"init", "amp", "checkpoint"}


def test_every_documented_argument_is_there_with_its_default() -> None:
    """Of SageMaker's page for PyTorch, version 1.x."""
    known = {
        "step": "non_split_inputs=None, input_split_axes=None, detach_outputs=True",
        "DistributedModel": "module",
        "DistributedModel.backward": "tensors, grad_tensors=None",
        "DistributedModel.local_parameters": "recurse=True",
        "DistributedModel.local_named_parameters": "prefix='', recurse=True",
        "DistributedModel.local_buffers": "recurse=True",
        "DistributedModel.local_named_buffers": "prefix='', recurse=True",
        "DistributedModel.local_named_modules": "memo=None, prefix=''",
        "DistributedOptimizer": "optimizer, static_loss_scale=1.0, dynamic_loss_scale=False",
        "DistributedOptimizer.clip_master_grads": "max_norm, norm_type=2.0",
        "broadcast": "obj, group", "send": "obj, dest_rank, rank_type", "recv_from": "src_rank, rank_type",
        "allgather": "obj, group", "barrier": "group",
        "set_tensor_parallelism": "module, enabled=True",
        "tp_register": "dist_module, init_hook=None, forward_hook=None, return_hook=None",
        "tp_register_with_module": "module_cls, dist_module, init_hook=None, forward_hook=None, return_hook=None",
        "delay_param_initialization": "enabled=True",
        "model_creation": "tensor_parallelism=False, dtype=None",
        "checkpoint": "module",
        "checkpoint_sequential": (
            "sequential_module, input, preserve_rng_state=True, strategy='each', pack_args_as_tuple=False"
        ),
        "set_activation_checkpointing": "module, preserve_rng_state=True, pack_args_as_tuple=False, strategy='each'",
        "save_checkpoint": (
            "path, tag, partial=True, model=None, optimizer=None, user_content=None, translate_if_full=True, "
            "num_kept_partial_checkpoints=None"
        ),
        "resume_from_checkpoint": (
            "path, tag=None, partial=True, strict=True, load_optimizer=True, load_sharded_optimizer_state=True, "
            "translate_function=None"
        ),
        "save": "obj, f, partial=True", "load": "f, map_location, pickle_module, partial=True",
        "partition": "index", "set_partition": "module, index",
    }  # fmt: skip
    for name, wanted in known.items():
        found = functools.reduce(getattr, name.split("."), modelparallel)
        has = inspect.signature(found).parameters
        for argument in wanted.split(", "):
            label, _, default = argument.partition("=")
            assert label in has, f"{name} takes {', '.join(has)}"
            assert not default or repr(has[label].default) == default, f"{name}({label}={has[label].default!r})"


def test_the_page_has_the_table() -> None:
    assert names.table() in (ROOT / "docs" / "sagemaker.md").read_text(encoding="utf-8"), (
        "run: python -c 'from shardwright.compat.names import table; print(table())'"
    )


@pytest.fixture
def without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before anything was installed."""
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if type(one).__name__ != "_Finder"])
    for name in [*sys.modules]:
        if f"{name}.".startswith((f"{shardwright.compat.ROOT}.", f"{shardwright.compat.SECOND}.")):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("without_them")
def test_modules_are_found_as_others_are() -> None:
    assert importlib.util.find_spec("smdistributed") is None
    shardwright.compat.install()
    shardwright.compat.install()
    assert importlib.util.find_spec("smdistributed") is not None
    assert importlib.import_module("smdistributed.modelparallel.torch") is modelparallel
    assert importlib.import_module("smdistributed.modelparallel").__version__ == modelparallel.__version__
    assert sys.modules["smdistributed"].modelparallel.torch is modelparallel
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("smdistributed.modelparallel.tensorflow")
    for name, module in (("rmsg", "torch"), ("dump_model", "test.torch"), ("verify", "test.torch")):
        undescribed = getattr(importlib.import_module(f"smdistributed.modelparallel.{module}.utils"), name)
        with pytest.raises(MissingCapabilityError, match=f"{name} is described nowhere"):
            undescribed("text")
    assert importlib.import_module("shardwright.compat.modelparallel") is modelparallel


@pytest.mark.usefixtures("without_them")
def test_another_library_of_that_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smdistributed", json)
    with pytest.raises(ShardwrightError, match="is loaded already, and is not Shardwright's"):
        shardwright.compat.install()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_script_that_takes_a_gpu_for_granted_runs_without_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import subprocess, sys, torch
torch.cuda.set_device(0)
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert torch.cuda.current_device() == 0
assert torch.cuda.is_available() is ("told" in sys.argv)
assert not torch.cuda.amp.autocast()._enabled  # torch's own files are told the truth
assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
device = torch.device("cuda")
model = torch.nn.Linear(2, 1).to(device).cuda()
x = torch.ones(1, 2).to("cuda:0", dtype=torch.float32, non_blocking=True).pin_memory().cuda()
assert model(x).device.type == "cpu"
assert torch.ones(2).to(torch.float64).dtype is torch.float64
found = "import os; print(os.environ['SHARDWRIGHT_COMPAT'])"
assert subprocess.run([sys.executable, "-c", found], capture_output=True, text=True).stdout == "1\\n"
try:
    torch.cuda.get_device_name()
except (AssertionError, RuntimeError) as error:
    print("torch's own error:", error)
""",
        encoding="utf-8",
    )
    for arguments in ([str(script)], ["--cuda-is-available", str(script), "told"]):
        outcome = run([sys.executable, "-m", "shardwright.compat", *arguments], 60)
        assert outcome.code == 0, outcome.text[-4000:]
        assert "calls of torch.cuda are answered by a stand-in" in outcome.text
        assert "torch's own error" in outcome.text


@modelparallel.step
def traced_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    assert modelparallel.is_tracing()
    return model(x)


def test_models_take_arguments_by_place_and_say_that_their_parts_are_parts() -> None:
    modelparallel.init({})
    assert not modelparallel.is_tracing()
    model = modelparallel.DistributedModel(torch.nn.Linear(2, 2), "cpu", False, False, True, 2)
    assert isinstance(model, sw.DistributedModel)
    assert isinstance(model, modelparallel.model.DistributedModel)
    assert model.runtime.gradients.passes_per_step == 2
    part = model.local_state_dict()
    assert part.pop("_smp_is_partial") is True
    assert "_smp_is_partial" not in model.state_dict()
    assert model.state_dict(gather_to_rank0=True).keys() == model.state_dict(rank0_only=True).keys() == part.keys()
    for held in (part, {**part, "_smp_is_partial": True}, model.state_dict()):
        model.load_state_dict({key: value * 0 + 3 if key == "bias" else value for key, value in held.items()})
        assert model.state_dict()["bias"].tolist() == [3, 3]
    with torch.no_grad():
        traced_step(model, torch.ones(2, 2))
    assert not modelparallel.is_tracing()
    assert model.module.module.module is model.get_module()

    class Loop:
        scale = 2.0

        @modelparallel.step
        def forward(model, x):
            return model(x)

        @modelparallel.step
        def scaled(self, model, x):
            return self.scale * model(x)

    with torch.no_grad():
        once = Loop().forward(model, torch.ones(2, 2)).concat()
        Comparison("methods").losses(Loop().scaled(model, torch.ones(2, 2)).concat(), 2 * once).require()
    with pytest.raises(TypeError, match="takes 9 arguments behind the module, given 10"):
        modelparallel.DistributedModel(torch.nn.Linear(2, 2), *range(10))
    with pytest.raises(TypeError, match="trace_device twice"):
        modelparallel.DistributedModel(torch.nn.Linear(2, 2), "cpu", trace_device="gpu")
    sw.shutdown()


def test_parts_of_marked_models_have_the_names_of_sagemakers_modules_too() -> None:
    modelparallel.init({})
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    names = list(GPT2LMHeadModel(config).state_dict())
    with modelparallel.model_creation(tensor_parallelism=True):
        model = modelparallel.DistributedModel(GPT2LMHeadModel(config))
    inside = model.get_module().transformer
    assert inside.seq_layers is inside.h
    assert inside.seq_layers[1].attention is inside.h[1].attn
    assert inside.seq_layers[1].output is inside.h[1].mlp
    assert list(model.state_dict()) == names
    assert not hasattr(modelparallel.DistributedModel(GPT2LMHeadModel(config)).transformer, "seq_layers")
    sw.shutdown()


def test_settings_of_their_own_modules_are_known() -> None:
    modelparallel.init({})
    asked = modelparallel.tensor_parallelism(True, fused_softmax=True)
    with pytest.warns(PlanWarning, match=r"tensor_parallelism: fused_softmax of SageMaker's own modules"):
        asked.__enter__()
    model = torch.nn.Linear(2, 2)
    asked.__exit__(None, None, None)
    with pytest.warns(PlanWarning, match=r"set_tensor_parallelism: fused_softmax of"):
        modelparallel.set_tensor_parallelism(model, True, fused_softmax=True, use_alibi=False)
    modelparallel.set_tensor_parallelism(model, False, use_alibi=True)  # it is divided nowhere
    with pytest.raises(MissingCapabilityError, match=r"set_tensor_parallelism\(use_alibi=True\) changes what"):
        modelparallel.set_tensor_parallelism(model, use_alibi=True)
    with pytest.raises(ShardwrightError, match="tensor_parallelism knows no setting 'use_alibis'"):
        modelparallel.tensor_parallelism(use_alibis=True).__enter__()
    sw.shutdown()


class Settings:
    def to_dict(self) -> dict[str, object]:
        return {"width": 4}


def test_objects_with_a_dict_are_saved_as_it(tmp_path: Path) -> None:
    modelparallel.init({})
    modelparallel.DistributedModel(torch.nn.Linear(2, 2))
    with pytest.warns(PlanWarning, match="user_content/nested/0 is a Settings, which only a pickle would hold"):
        modelparallel.save_checkpoint(tmp_path, "one", user_content={"nested": [Settings(), 3]})
    assert modelparallel.resume_from_checkpoint(tmp_path) == {"nested": [{"width": 4}, 3]}
    with pytest.warns(PlanWarning, match="the object/settings is a Settings"):
        modelparallel.save({"settings": Settings()}, tmp_path / "object", partial=False, pickle_protocol=4)
    assert modelparallel.load(tmp_path / "object", partial=False) == {"settings": {"width": 4}}
    given = {"kind": enum.Enum("Kind", {"STEPS": "steps"}).STEPS, "on": torch.device("cpu"), "at": Path("folder")}
    with pytest.warns(PlanWarning) as told:
        modelparallel.save(given, tmp_path / "object", partial=False)
    assert [str(one.message).partition(" is a")[0] for one in told] == [f"the object/{key}" for key in given]
    assert modelparallel.load(tmp_path / "object", partial=False) == {"kind": "steps", "on": "cpu", "at": "folder"}
    with pytest.warns(PlanWarning, match="translate_function has no effect"):
        modelparallel.resume_from_checkpoint(tmp_path, translate_function=len)
    with pytest.raises(MissingCapabilityError, match="translate_function"):
        modelparallel.resume_from_checkpoint(tmp_path, translate_function=len, strict=False)
    with pytest.raises(ShardwrightError, match="load takes no 'mmap'"):
        modelparallel.load(tmp_path / "object", partial=False, mmap=True)
    sw.shutdown()


def test_the_scale_of_losses_is_loaded_without_the_states_of_the_optimizer(tmp_path: Path) -> None:
    given = {"load_sharded_optimizer_state": False}, {"load_optimizer": False}, {}
    for number, arguments in enumerate(({}, *given)):
        modelparallel.init({"fp16": True, "log_every": 0})
        model = modelparallel.DistributedModel(torch.nn.Linear(2, 2))
        adam = torch.optim.Adam(model.parameters())
        optimizer = modelparallel.DistributedOptimizer(
            adam, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**9 if number else 2.0**6}
        )
        if not number:
            step = modelparallel.step(lambda model, x: model.backward(model(x).square().mean()))
            step(model, torch.ones(2, 2))
            optimizer.step()
            modelparallel.save_checkpoint(tmp_path, "one", model=model, optimizer=optimizer)
            weights = {name: entry.clone() for name, entry in model.state_dict().items()}
        else:
            modelparallel.resume_from_checkpoint(tmp_path, **arguments)
            Comparison("weights").equal(model.state_dict(), weights).require()
            assert optimizer.loss_scale == (2.0**9 if "load_optimizer" in arguments else 2.0**6)
            assert bool(adam.state) == (not arguments)
        sw.shutdown()


def test_groups_of_the_data_parallel_backend(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import smdistributed.dataparallel.torch.torch_smddp
import torch, torch.distributed as dist
dist.init_process_group(backend="smddp")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
assert dist.get_backend() == "smddp"
dist.destroy_process_group()
""",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outcome = run([*command, "-m", "shardwright.compat", str(script)], 60)
    assert outcome.code == 0, outcome.text[-4000:]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{pp: 2}", "SM_HP_MP_PARAMETERS='{pp: 2}' is no JSON"),
        ("[1]", "expected a JSON object"),
        ('{"partition": 2}', "did you mean 'partitions'"),
    ],
)
def test_a_configuration_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", text)
    for start in (sw.init, modelparallel.init):
        with pytest.raises(ShardwrightError, match=said):
            start()
    sw.init({})  # what is given counts
    sw.shutdown()


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "shardwright.compat", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return done.returncode, done.stderr

    usage = "usage: python -m shardwright.compat [--cuda-is-available] SCRIPT [ARGUMENT …]"
    for arguments in ((), ("--cuda-is-available",)):
        code, text = said(*arguments)
        assert (code, text.splitlines()[0]) == (2, usage)
    assert said("nothing.py") == (2, "nothing.py: there is no such script\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import smdistributed.modelparallel.torch as smp, sys\nprint(sys.argv)\nsmp.optimizers.FusedLAM\n"
    )
    code, text = said(str(script), "a", "-b")
    assert code == 1
    assert "smdistributed.modelparallel.torch.optimizers.FusedLAM: did you mean 'optimizers.FusedLAMB'" in text
