"""One suite over every backend: what the boundary promises holds in each framework."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwright as sw
from shardwright.backends import protocol
from shardwright.core.capabilities import Capabilities
from shardwright.core.errors import CaptureError, ClusterError, LossError, MissingCapabilityError, PlanError
from shardwright.core.model.fold import fold
from shardwright.core.model.structure import structure_of

WIDTH, SAMPLES = 16, 8


@dataclass
class Case:
    """A two-block residual network with a scalar loss, in one framework."""

    backend: protocol.Backend
    model: Any
    sample: Any
    loss: Any
    options: dict[str, Any]
    other_model: Any

    def plan(self, **pins: Any) -> sw.Plan:
        pins = {"pp": 1, "dp": 1, "tp": 1, "batch": SAMPLES, "microbatch": 2} | pins
        size = pins["pp"] * pins["dp"] * pins["tp"]
        graph = self.backend.capture(self.model, self.sample, self.loss)
        return sw.plan(graph, sw.Cluster("cpu", devices_per_node=size), precision="fp32", recompute="none", **pins)


def torch_case() -> Case:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Net(nn.Module):
        def __init__(self, blocks: int = 2) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    sample = torch.from_numpy(inputs())
    options = {"loss": lambda out: (out**2).mean(), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    return Case(protocol.load("torch"), Net(), (sample,), options["loss"], options, Net(3))


def jax_case() -> Case:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(jax.nn.relu(self.up(x)))

    class Net(nnx.Module):
        def __init__(self, blocks: int = 2) -> None:
            rngs = nnx.Rngs(0)
            self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x

    def loss(model: Net, batch: jax.Array) -> jax.Array:
        return jnp.mean(model(batch) ** 2)

    options = {"loss": loss, "optimizer": optax.sgd(0.1), "devices": jax.devices()[:1]}
    return Case(protocol.load("jax"), Net(), jnp.asarray(inputs()), loss, options, Net(3))


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(SAMPLES, WIDTH)).astype(np.float32)


@pytest.fixture(params=["torch", "jax"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param == "jax":
        yield jax_case()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch_case()
    dist.destroy_process_group()


def test_it_names_itself_and_its_capabilities(case: Case) -> None:
    assert case.backend.name == case.backend.capabilities.framework
    assert isinstance(case.backend.capabilities, Capabilities)
    assert case.backend.capabilities.axes


def test_capture_gives_a_graph_with_the_whole_model(case: Case) -> None:
    graph = case.backend.capture(case.model, case.sample, case.loss)
    assert graph.framework == case.backend.name
    assert graph.parameter_count() == 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
    assert [len(graph.tensors[t].fixed) for t in graph.outputs] == [0]
    assert graph.sample_batch == SAMPLES


def test_both_captures_have_one_structure() -> None:
    cases = (torch_case(), jax_case())
    one, two = (structure_of(fold(c.backend.capture(c.model, c.sample, c.loss)))[0] for c in cases)
    assert one.difference(two) is None


def test_capture_refuses_what_has_no_loss(case: Case) -> None:
    model = case.model if case.backend.name == "torch" else (lambda params, batch: batch)
    sample = case.sample if case.backend.name == "torch" else ({"w": inputs()}, inputs())
    with pytest.raises(CaptureError, match="loss"):
        case.backend.capture(model, sample)


def test_bind_refuses_another_number_of_devices(case: Case) -> None:
    with pytest.raises(ClusterError, match="1000"):
        case.backend.bind(sw.Mesh.of(pp=1, dp=1000, tp=1))


def test_training_follows_the_plan_and_gives_parameters_back_by_name(case: Case) -> None:
    plan = case.plan()
    run = case.backend.compile(plan, case.model, **case.options)
    batch = case.sample if case.backend.name == "jax" else case.sample[0]
    losses = [run.step(batch) for _ in range(4)]
    assert all(np.isfinite(losses))
    assert losses == sorted(losses, reverse=True)
    names = set(plan.parameter_stages(case.backend.name))
    assert set(run.whole_parameters()) == names


def with_loss(case: Case, of: Any) -> Case:
    """The same with the loss that ``of`` makes of the model's output."""
    case.loss = of if case.backend.name == "torch" else lambda model, batch: of(model(batch))
    case.options = case.options | {"loss": case.loss}
    return case


def test_the_loss_of_a_batch_is_that_of_the_unsplit_model(case: Case) -> None:
    given = case.sample if case.backend.name == "jax" else case.sample[0]
    output = case.model(given) if case.backend.name == "jax" else case.model(given).detach()
    squares = float((np.asarray(output) ** 2).sum())
    summed = with_loss(case, lambda out: (out**2).sum())
    run = summed.backend.compile(summed.plan(), copy.deepcopy(case.model), **summed.options)
    assert run.step(given) == pytest.approx(squares, rel=1e-5)


def test_a_loss_that_couples_samples_is_asked_for(case: Case) -> None:
    given = case.sample if case.backend.name == "jax" else case.sample[0]
    coupled = with_loss(case, lambda out: (out**2).mean() ** 0.5)
    plan = coupled.plan()
    with pytest.raises((LossError, PlanError), match="reduction='mean'"):
        coupled.backend.compile(plan, copy.deepcopy(case.model), **coupled.options).step(given)
    run = coupled.backend.compile(plan, copy.deepcopy(case.model), reduction="mean", **coupled.options)
    assert np.isfinite(run.step(given))


def test_a_loss_scope_of_the_plan_answers(case: Case, tmp_path: Path) -> None:
    given = case.sample if case.backend.name == "jax" else case.sample[0]
    coupled = with_loss(case, lambda out: (out**2).mean() ** 0.5)
    assert coupled.plan().decision.loss_scope is None
    coupled.plan(loss_scope="replica").save(tmp_path / "plan.json")
    run = coupled.backend.compile(sw.Plan.load(tmp_path / "plan.json"), coupled.model, **coupled.options)
    assert np.isfinite(run.step(given))


def test_both_frameworks_learn_the_same_from_the_same_weights() -> None:
    ours, twin = torch_case(), jax_case()
    from flax import nnx

    state = dict(ours.model.named_parameters())
    graphdef, params = nnx.split(twin.model)
    flat = []
    for path, variable in nnx.to_flat_state(params):
        *parents, leaf = (str(p) for p in path)
        given = state[".".join([*parents, "bias" if leaf == "bias" else "weight"])].detach().numpy().copy()
        flat.append((path, variable.replace(given if leaf == "bias" else given.T)))
    twin.model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    runs = [c.backend.compile(c.plan(), c.model, **c.options) for c in (ours, twin)]
    for _ in range(5):
        assert runs[0].step(ours.sample[0]) == pytest.approx(runs[1].step(twin.sample), rel=1e-5)
    import torch.distributed as dist

    dist.destroy_process_group()


def test_a_plan_for_another_model_is_refused(case: Case) -> None:
    with pytest.raises(PlanError, match=r"another model|lacks"):
        case.backend.compile(case.plan(), case.other_model, **case.options)


def test_an_axis_that_the_runtime_lacks_is_named(case: Case) -> None:
    lacking = next((a for a in ("pp", "tp") if a not in case.backend.capabilities.axes), None)
    if lacking is None:
        pytest.skip("this runtime has every axis")
    plan = case.plan(**{lacking: 2})
    with pytest.raises(MissingCapabilityError, match=f"{lacking}=2"):
        case.backend.compile(plan, case.model, **case.options)


def test_an_unknown_backend_names_the_known() -> None:
    with pytest.raises(sw.ShardwrightError, match="did you mean 'torch'"):
        protocol.load("troch")
