"""The names and keys of SageMaker's second version."""

import functools
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright.compat
import shardwright.torch as sw
from shardwright.compat import keys as first_keys
from shardwright.compat import names as first_names
from shardwright.compat import torch_sagemaker as tsm
from shardwright.compat.meanings import MEANS_IN_SECOND
from shardwright.compat.torch_sagemaker import keys, names
from shardwright.compat.torch_sagemaker.distributed.checkpoint import state_dict_loader
from shardwright.compat.torch_sagemaker.nn.attn import FlashGroupedQueryAttention, FlashSelfAttention
from shardwright.core.errors import CheckpointError, MissingCapabilityError, PlanWarning, ShardwrightError
from shardwright.torch.config import read_config
from tests.comparison import Comparison
from tests.torch.launch import ROOT, on_ranks

OWN_KEYS = {
    "hybrid_shard_degree": "sharded_data_parallel_degree", "sm_activation_offloading": "offload_activations",
    "random_seed": "seed",
}  # fmt: skip


@pytest.mark.timeout(600)
def test_scripts_of_the_second_version_run(tmp_path: Path) -> None:
    outcome = on_ranks("torch_sagemaker.py", 2, str(tmp_path), timeout_s=150)
    assert outcome.code == 0, outcome.text[-4000:]
    assert outcome.text.count("ok ") >= 4, outcome.text[-4000:]


@pytest.mark.parametrize("name", names.NAMES, ids=lambda one: one.name)
def test_every_name_is_there_or_refused_by_name(name: names.Name) -> None:
    inside, _, last = name.name.rpartition(".")
    if inside == "state":
        with pytest.raises(ShardwrightError, match=r"call torch\.sagemaker\.init\(\) first"):
            getattr(tsm.state, last)
        tsm.init({})
        getattr(tsm.state, last)
        sw.shutdown()
        return
    module = importlib.import_module(".".join(["shardwright.compat.torch_sagemaker", *filter(None, [inside])]))
    found = getattr(module, last)
    if name.state == "refused":
        with pytest.raises(MissingCapabilityError, match=last):
            found()
    else:
        assert callable(found)


@pytest.mark.parametrize("key", keys.KEYS, ids=lambda one: one.name)
def test_every_key_acts_or_says_that_it_does_not(key: keys.Key) -> None:
    given = {"tensor_parallel_degree": 2, key.name: key.example}
    if key.name == "activation_loading_horizon":
        given["sm_activation_offloading"] = True
    if key.state == "fixed":
        with pytest.raises(MissingCapabilityError, match=f"{key.name}={key.example} is not carried out: leave it at"):
            keys.translated(given, 8)
        keys.translated(given | {key.name: key.default}, 8)
    elif key.state == "none":
        with pytest.warns(PlanWarning, match=f"{key.name} has no effect"):
            found = keys.translated(given, 8)
        del given[key.name]
        assert found == keys.translated(given, 8)
    else:
        held = read_config(keys.translated(given, 8))
        assert getattr(held, OWN_KEYS.get(key.name, key.name)) == key.example


def test_degrees_of_sharding() -> None:
    """0 without a tensor axis leaves models to the script, else it is all replicas; 1 shards nothing."""

    def shared(world: int, **given: int) -> int:
        return read_config(keys.translated(given, world)).sharded_data_parallel_degree

    assert [shared(8), shared(8, hybrid_shard_degree=1), shared(8, hybrid_shard_degree=4)] == [1, 1, 4]
    assert shared(8, tensor_parallel_degree=2) == 4
    assert shared(8, tensor_parallel_degree=8) == 1
    assert shared(8, pipeline_parallel_degree=2) == 4
    with pytest.warns(PlanWarning, match="where the script's own wrappers decide"):
        keys.translated({"sm_activation_offloading": True}, 8)
    with pytest.warns(PlanWarning, match="no effect without sm_activation_offloading"):
        keys.translated({"activation_loading_horizon": 3, "tensor_parallel_degree": 2}, 8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hybrid_shard_degre": 2}, "did you mean 'hybrid_shard_degree'"),
        ({"hybrid_shard_degree": 9}, "hybrid_shard_degree=9: expected at most 8"),
        ({"hybrid_shard_degree": -1}, "expected at least 0"),
        ({"tensor_parallel_degree": 0}, "expected at least 1"),
        ({"tensor_parallel_degree": "2"}, "expected a whole number"),
        ({"sm_activation_offloading": 1}, "expected True or False"),
    ],
)
def test_bad_keys(given: dict[str, object], said: str) -> None:
    with pytest.raises(ShardwrightError, match=said):
        keys.translated(given, 8)


def test_configurations_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"random_seed": 4}), encoding="utf-8")
    for given in (str(file), None):
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"random_seed": 4, "bf16": true}')
        tsm.init(given)
        assert tsm.is_initialized()
        assert sw.session.current().config.seed == 4
        assert sw.session.current().config.bf16 == (given is None)
        sw.shutdown()
    file.write_text("[1]", encoding="utf-8")
    for path, said in ((str(file), "holds a list"), (str(tmp_path / "none.json"), "expected the path of a JSON file")):
        with pytest.raises(ShardwrightError, match=said):
            tsm.init(path)


def test_what_transform_refuses() -> None:
    with pytest.raises(ShardwrightError, match=r"call torch\.sagemaker\.init"):
        tsm.transform(nn.Linear(2, 2))
    tsm.init({})
    model = nn.Linear(2, 2)
    assert tsm.transform(model, dtype=torch.bfloat16) is model
    assert model.weight.dtype is torch.bfloat16
    with pytest.raises(MissingCapabilityError, match=r"transform\(config=\{'moe': 1\}\)"):
        tsm.transform(model, config={"moe": 1})
    with pytest.raises(ShardwrightError, match="expected 'p2p' or 'all_gather'"):
        tsm.transform(model, cp_comm_type="ring")
    with pytest.raises(ShardwrightError, match="expected a floating dtype"):
        tsm.transform(model, dtype=torch.int8)
    sw.shutdown()
    tsm.init({"hybrid_shard_degree": 1})
    with pytest.raises(ShardwrightError, match=r"transform\(device='cuda'\): the run is on cpu"):
        tsm.transform(model, device="cuda")
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(ShardwrightError, match="the model of rank 0 is on the meta device"):
        tsm.transform(empty, load_state_dict_from_rank0=True)
    sw.shutdown()


def test_attention() -> None:
    """Of both layouts and both forms, against the formula."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 5, 3) for _ in range(3))
    scores = query @ key.transpose(2, 3) * 3**-0.5
    masked = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    expected = {False: scores.softmax(-1) @ value, True: masked.softmax(-1) @ value}
    own, found = FlashSelfAttention(), Comparison("attention")
    close = functools.partial(found.values, relative=1e-5, absolute=1e-6)
    for causal, wanted in expected.items():
        laid = [one.transpose(1, 2) for one in (query, key, value)]
        forms = [own((query, key, value), causal=causal), own(torch.cat((query, key, value), 1), causal=causal)]
        forms += [own(laid, causal=causal, layout="b s h d"), own(torch.cat(laid, 2), causal=causal, layout="b s h d")]
        for form in forms:
            close(form, wanted)
    grouped, few = FlashGroupedQueryAttention(scale=0.5), torch.randn(2, 2, 2, 5, 3)
    wanted = F.scaled_dot_product_attention(query, *few.repeat_interleave(2, 2), scale=0.5)
    close(grouped(query, tuple(few), layout="b h s d"), wanted)
    close(grouped(query.transpose(1, 2), torch.cat((*few,), 1).transpose(1, 2)), wanted)
    bias = torch.randn(2, 1, 1, 5)
    with_bias = FlashSelfAttention(triton_flash_attention=True, use_alibi=True)
    close(with_bias((query, key, value), bias), (scores + bias).softmax(-1) @ value)
    close(with_bias((query, key, value), bias, causal=True), (masked + bias).softmax(-1) @ value)
    found.require()
    assert own((query, key, value), cast_dtype=torch.bfloat16).dtype is torch.bfloat16
    for wrong, said in (
        (lambda: own(query), "is no 3 tensors of the layout"),
        (lambda: own((query, key)), "given 2 tensors"),
        (lambda: own((query, key, value), layout="s b h d"), "expected 'b h s d' or 'b s h d'"),
        (lambda: own((query, key, value), bias), "attn_mask needs"),
        (lambda: FlashSelfAttention(0.1, triton_flash_attention=True), "has no dropout"),
        (lambda: FlashSelfAttention(use_alibi=True), "needs triton_flash_attention=True"),
        (lambda: grouped(query, (key[:, :3], value[:, :3]), layout="b h s d"), "do not share 3 of keys evenly"),
    ):
        with pytest.raises(ShardwrightError, match=said):
            wrong()


def test_checkpoints_that_would_run_something_are_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError):
        state_dict_loader.load({}, checkpoint_id=tmp_path)


def test_its_modules_are_found_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if type(one).__name__ != "_Finder"])
    for name in [*sys.modules]:
        if f"{name}.".startswith((f"{shardwright.compat.ROOT}.", f"{shardwright.compat.SECOND}.")):
            monkeypatch.delitem(sys.modules, name)
    shardwright.compat.install()
    assert importlib.import_module("torch.sagemaker") is tsm
    assert importlib.import_module("torch.sagemaker.nn.attn").FlashSelfAttention is FlashSelfAttention
    assert functools.reduce(getattr, ("sagemaker", "nn", "attn"), torch).FlashSelfAttention is FlashSelfAttention
    monkeypatch.delattr(tsm, "grad_norm", raising=False)
    assert tsm.grad_norm is importlib.import_module("torch.sagemaker.grad_norm"), "without an import of its own"
    with pytest.raises(AttributeError, match=r"torch\.sagemaker\.transfrm: did you mean 'transform'"):
        _ = tsm.transfrm
    with pytest.raises(AttributeError, match=r"torch\.sagemaker\.state\.tp_rnk: did you mean 'state.tp_rank'"):
        _ = tsm.state.tp_rnk
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch.sagemaker.nothing")


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "sagemaker.md").read_text(encoding="utf-8")
    assert first_names.table(names.NAMES, MEANS_IN_SECOND) in page
    assert first_keys.table(keys.KEYS) in page
