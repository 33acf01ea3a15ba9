"""SageMaker's marks and Hugging Face's plans, from the model to the plan."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright.torch as sw
from shardwright.core.rules.pins import PinWarning

CLUSTER = sw.Cluster("a100-80gb", devices_per_node=2)


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        with sw.tensor_parallelism(enabled=False):
            self.head = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.head):
            x = block(x)
        return x.square().mean()


class Pair(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def layouts(model: nn.Module, asked: object = None) -> dict[str, sw.Layout]:
    graph = sw.capture(model, torch.randn(2, 8, 64))
    plan = sw.plan(graph, CLUSTER, batch=8, pp=1, dp=1, tp=2, layouts=asked)
    return plan.parameter_layouts("torch")


def test_marked_modules_stay_whole_and_the_others_are_split() -> None:
    model = Model()
    sw.set_tensor_parallelism(model.blocks[1], enabled=False)
    sw.set_tensor_parallelism(model.blocks[1].up, enabled=True)
    found = layouts(model)
    assert found["blocks.0.up.weight"] == sw.Layout.of(tp=sw.Split(0))
    assert found["blocks.1.down.weight"].is_replicated
    assert found["head.up.weight"].is_replicated
    assert found["head.down.weight"].is_replicated


def test_the_context_ends_with_its_block() -> None:
    with sw.tensor_parallelism(enabled=False):
        inside = Model()
    assert all(layout.is_replicated for layout in layouts(inside).values())
    assert not layouts(Model())["blocks.0.up.weight"].is_replicated


def test_the_innermost_context_wins() -> None:
    with sw.tensor_parallelism(enabled=False):
        outer = Block()
        with sw.tensor_parallelism():
            inner = Block()
    found = layouts(Pair(outer, inner))
    assert found["0.up.weight"].is_replicated
    assert found["1.up.weight"] == sw.Layout.of(tp=sw.Split(0))


def test_only_modules_are_marked() -> None:
    with pytest.raises(sw.ShardwrightError, match=r"marks a torch\.nn\.Module, not a str"):
        sw.set_tensor_parallelism("blocks.0")  # type: ignore[arg-type]


def llama() -> sw.Graph:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=256)  # fmt: skip
    with torch.device("meta"):
        model, tokens = LlamaForCausalLM(config), torch.empty(2, 16, dtype=torch.long)
    return sw.capture(model, {"input_ids": tokens, "labels": tokens})


def test_a_hugging_face_plan_is_kept() -> None:
    """The plan that the library ships for the model; what it says nothing of is searched."""
    asked = LlamaConfig.base_model_tp_plan
    plan = sw.plan(llama(), CLUSTER, batch=8, pp=1, dp=1, tp=2, layouts=asked)
    found = plan.parameter_layouts("torch")
    for name, style in asked.items():
        if style in ("colwise", "rowwise"):
            path = "model." + name.replace("*", "1") + ".weight"
            assert found[path] == sw.Layout.of(tp=sw.Split(0 if style == "colwise" else 1)), path
    assert "tp" in str(found["model.embed_tokens.weight"])


def test_an_unknown_style_warns_and_the_rest_holds() -> None:
    asked = {"layers.*.mlp.up_proj": "rowwise", "layers.*.mlp.gate_proj": "rowise"}
    with pytest.warns(PinWarning, match="style 'rowise' .* did you mean 'rowwise'"):
        plan = sw.plan(llama(), CLUSTER, batch=8, pp=1, dp=1, tp=2, layouts=asked)
    assert plan.parameter_layouts("torch")["model.layers.0.mlp.up_proj.weight"] == sw.Layout.of(tp=sw.Split(1))
