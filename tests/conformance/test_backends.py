"""One suite over every backend: what the boundary promises holds in each framework, level by level.

Each test is of a level (`registry.LEVELS`), and runs for the backends that claim it.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwright as sw
from shardwright.backends import protocol, registry
from shardwright.backends.registry import registered
from shardwright.core.capabilities import Capabilities
from shardwright.core.errors import CaptureError, LossError, MissingCapabilityError, PlanError
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.model.fold import fold
from shardwright.core.model.structure import structure_of
from shardwright.report.support import support_table
from tests.comparison import Comparison
from tests.numpy_backend import REGISTRATION

WIDTH, SAMPLES = 16, 8


@dataclass
class Case:
    """A two-block residual network with a scalar loss, in one framework.

    ``given`` is the sample as steps take it; ``unsplit`` the plain model's output on it; ``loss_of`` makes the loss
    argument from a function of the output, None where the framework's models have losses of their own.
    """

    backend: protocol.Backend
    model: Any
    sample: Any
    given: Any
    loss: Any
    options: dict[str, Any]
    other_model: Any
    other_sample: Any
    unsplit: Callable[[], Any]
    loss_of: Callable[[Any], Any] | None

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
    model = Net()
    return Case(
        registry.load("torch"), model, (sample,), sample, options["loss"], options, Net(3), (sample,),
        lambda: model(sample).detach(), lambda of: of,
    )  # fmt: skip


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
    model, sample = Net(), jnp.asarray(inputs())
    return Case(
        registry.load("jax"), model, sample, sample, loss, options, Net(3), ({"w": inputs()}, inputs()),
        lambda: model(sample), lambda of: lambda model, batch: of(model(batch)),
    )  # fmt: skip


def numpy_case() -> Case:
    from tests.numpy_backend.backend import Network

    model = Network(2, WIDTH)
    return Case(
        registry.load("numpy"), model, inputs(), inputs(), None, {}, Network(3, WIDTH), inputs(),
        lambda: model.output(inputs()), None,
    )  # fmt: skip


MAKE = {"torch": torch_case, "jax": jax_case, "numpy": numpy_case}
if "numpy" not in registry.registered():
    registry.register(REGISTRATION)


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(SAMPLES, WIDTH)).astype(np.float32)


def of_level(level: str) -> pytest.MarkDecorator:
    """The backends that claim a level, each of which the test runs for."""
    return pytest.mark.parametrize("case", [n for n in MAKE if level in registered()[n].levels], indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param != "torch":
        yield MAKE[request.param]()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch_case()
    dist.destroy_process_group()


def test_every_backend_has_a_case() -> None:
    assert set(MAKE) == set(registered())


@of_level("capture")
def test_it_names_itself_and_its_capabilities(case: Case) -> None:
    assert case.backend.name == case.backend.capabilities.framework
    assert isinstance(case.backend.capabilities, Capabilities)
    assert case.backend.capabilities == registered()[case.backend.name].capabilities


@of_level("capture")
def test_capture_gives_a_graph_with_the_whole_model(case: Case) -> None:
    graph = case.backend.capture(case.model, case.sample, case.loss)
    assert graph.framework == case.backend.name
    assert graph.memory_traits == registered()[case.backend.name].memory_traits
    assert graph.parameter_count() == 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
    assert [len(graph.tensors[t].fixed) for t in graph.outputs] == [0]
    assert graph.sample_batch == SAMPLES


def test_both_captures_have_one_structure() -> None:
    cases = (torch_case(), jax_case())
    one, two = (structure_of(fold(c.backend.capture(c.model, c.sample, c.loss)))[0] for c in cases)
    assert one.difference(two) is None


@of_level("capture")
def test_a_loss_is_the_models_own_or_asked_for(case: Case) -> None:
    if case.loss_of is None:
        with pytest.raises(CaptureError, match="loss"):
            case.backend.capture(case.model, case.sample, lambda output: output)
        return
    model = case.model if case.backend.name == "torch" else (lambda params, batch: batch)
    with pytest.raises(CaptureError, match="loss"):
        case.backend.capture(model, case.other_sample)


@of_level("one rank")
def test_training_follows_the_plan_and_gives_parameters_back_by_name(case: Case) -> None:
    plan = case.plan()
    run = case.backend.compile(plan, case.model, **case.options)
    losses = [run.step(case.given) for _ in range(4)]
    assert all(np.isfinite(losses))
    assert losses == sorted(losses, reverse=True)
    names = set(plan.parameter_stages(case.backend.name))
    assert set(run.whole_parameters()) == names


def with_loss(case: Case, of: Any) -> Case:
    """The same with the loss that ``of`` makes of the model's output."""
    if case.loss_of is None:
        pytest.skip("its models have losses of their own")
    case.loss = case.loss_of(of)
    case.options = case.options | {"loss": case.loss}
    return case


@of_level("one rank")
def test_the_loss_of_a_batch_is_that_of_the_unsplit_model(case: Case) -> None:
    output = np.asarray(case.unsplit())
    run = case.backend.compile(case.plan(), copy.deepcopy(case.model), **case.options)
    assert run.step(case.given) == pytest.approx(float((output**2).mean()), rel=1e-5)


@of_level("one rank")
def test_a_sum_over_a_batch_is_that_of_the_unsplit_model(case: Case) -> None:
    squares = float((np.asarray(case.unsplit()) ** 2).sum())
    summed = with_loss(case, lambda out: (out**2).sum())
    run = summed.backend.compile(summed.plan(), copy.deepcopy(case.model), **summed.options)
    assert run.step(case.given) == pytest.approx(squares, rel=1e-5)


@of_level("one rank")
def test_a_loss_that_couples_samples_is_asked_for(case: Case) -> None:
    coupled = with_loss(case, lambda out: (out**2).mean() ** 0.5)
    plan = coupled.plan()
    with pytest.raises((LossError, PlanError), match="reduction='mean'"):
        coupled.backend.compile(plan, copy.deepcopy(case.model), **coupled.options).step(case.given)
    run = coupled.backend.compile(plan, copy.deepcopy(case.model), reduction="mean", **coupled.options)
    assert np.isfinite(run.step(case.given))


@of_level("one rank")
def test_a_loss_scope_of_the_plan_answers(case: Case, tmp_path: Path) -> None:
    coupled = with_loss(case, lambda out: (out**2).mean() ** 0.5)
    assert coupled.plan().decision.loss_scope is None
    coupled.plan(loss_scope="replica").save(tmp_path / "plan.json")
    run = coupled.backend.compile(sw.Plan.load(tmp_path / "plan.json"), coupled.model, **coupled.options)
    assert np.isfinite(run.step(case.given))


# Several ranks --------------------------------------------------------------------------------------------------

STEPS = 3
DEGREES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "state": {"dp": 2, "shard": 3},
}
"""What a plan asks of each level."""
MEGATRON = tuple(
    (slot, Layout.of(tp=place)) for slot, place in (("0/v0", Split(0)), ("0/w0", Split(1)), ("0/w1", Split(0)))
)
"""Columns, then rows (arXiv 1909.08053): so small a network gains nothing by it, so that no search would choose it."""
Trained = dict[str, np.ndarray]
"""The losses of the steps, and every parameter after them, by name."""


def plan_of_level(case: Case, level: str) -> sw.Plan:
    plan = case.plan(**DEGREES[level])
    if level != "tp":
        return plan
    graph = case.backend.capture(case.model, case.sample, case.loss)
    return replace(plan, decision=replace(plan.decision, layouts=MEGATRON)).rebind(graph)


def trained(case: Case, plan: sw.Plan) -> Trained:
    run = case.backend.compile(plan, copy.deepcopy(case.model), **case.options)
    losses = np.array([run.step(case.given) for _ in range(STEPS)])
    return {"losses": losses} | {name: np.asarray(value) for name, value in run.whole_parameters().items()}


def on_jax_devices(levels: list[str], folder: Path) -> dict[str, Trained]:
    import jax

    case = jax_case()
    case.options |= {"devices": jax.devices()[:2]}
    return {level: trained(case, plan_of_level(case, level)) for level in levels}


def on_torch_ranks(levels: list[str], folder: Path) -> dict[str, Trained]:
    from tests.torch.launch import on_ranks

    case, out = torch_case(), folder / "trained.npz"
    for level in levels:
        plan_of_level(case, level).save(folder / f"{level}.json")
    files = [str(folder / f"{level}.json") for level in levels]
    worker = Path(__file__).parent / "torch_ranks.py"
    outcome = on_ranks(str(worker), 2, str(out), str(STEPS), *files, timeout_s=120)
    assert outcome.code == 0, outcome.text[-4000:]
    with np.load(out) as held:
        return {
            level: {name.split(" ", 1)[1]: held[name] for name in held.files if name.startswith(f"{number} ")}
            for number, level in enumerate(levels)
        }


ON_RANKS = {"torch": on_torch_ranks, "jax": on_jax_devices}
CLAIMS = [(n, level) for n in ON_RANKS for level in DEGREES if level in registered()[n].levels]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trained]:
    return {
        (name, level): found
        for name, run in ON_RANKS.items()
        for level, found in run([at for of, at in CLAIMS if of == name], tmp_path_factory.mktemp(name)).items()
    }


@pytest.mark.parametrize(("case", "level"), CLAIMS, indirect=["case"])
def test_two_ranks_train_as_one(case: Case, level: str, on_two_ranks: dict[tuple[str, str], Trained]) -> None:
    expected, found = trained(case, case.plan()), on_two_ranks[case.backend.name, level]
    same = Comparison(f"{case.backend.name} {level}").losses(found.pop("losses"), expected.pop("losses"))
    same.values(found, expected, relative=1e-5, absolute=1e-6, what="parameters").require("losses", "parameters")


def test_every_level_above_one_rank_is_trained() -> None:
    claimed = {(name, level) for name, each in registered().items() for level in each.levels if level in DEGREES}
    assert set(CLAIMS) == claimed
    assert {*DEGREES, "capture", "one rank"} == set(registry.LEVELS)


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


@of_level("one rank")
def test_a_plan_for_another_model_is_refused(case: Case) -> None:
    with pytest.raises(PlanError, match=r"another model|lacks"):
        case.backend.compile(case.plan(), case.other_model, **case.options)


@pytest.mark.parametrize("axis", ["pp", "dp", "tp"])
def test_an_axis_that_no_level_claims_is_refused_by_name(axis: str) -> None:
    lacking = [name for name in MAKE if axis not in registered()[name].levels and registered()[name].trains]
    assert lacking, "every backend has it: the check is of none"
    for name in lacking:
        case = MAKE[name]()
        plan = case.plan(**{axis: 2})
        with pytest.raises(MissingCapabilityError, match=f"{axis}=2"):
            case.backend.compile(plan, case.model, **case.options)
        with pytest.raises(PlanError, match=f"the {name} runtime carries out no"):
            sw.plan(case.backend.capture(case.model, case.sample), sw.Cluster("cpu", devices_per_node=2), batch=8)


def test_the_documentation_has_the_table_of_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_others", {})
    page = Path(__file__).parents[2] / "docs" / "backends.md"
    assert support_table() in page.read_text(encoding="utf-8")


def test_models_of_a_registered_backend_are_captured_and_planned_by_the_public_names() -> None:
    case = numpy_case()
    plan = sw.plan(sw.capture(case.model, case.sample), sw.Cluster("cpu"), batch=SAMPLES, precision="fp32")
    assert plan.provenance.captured_from == "numpy"
    torch_plan = torch_case().plan()  # another framework's twins are what they were
    assert torch_plan.decision.pp == 1


def test_backends_that_cannot_be_are_refused() -> None:
    with pytest.raises(sw.ShardwrightError, match=r"'numpy' is registered already \(tests\.numpy_backend\.backend\)"):
        registry.register(REGISTRATION)
    with pytest.raises(sw.ShardwrightError, match=r"'torch' is registered already"):
        registry.register(replace(REGISTRATION, capabilities=replace(REGISTRATION.capabilities, framework="torch")))
    with pytest.raises(sw.ShardwrightError, match=r"expected a .*Registration"):
        registry.register("numpy")  # type: ignore[arg-type]
    with pytest.raises(sw.ShardwrightError, match=r"claims level 'one rnak': did you mean 'one rank'"):
        replace(REGISTRATION, levels=("one rnak",))
    with pytest.raises(sw.ShardwrightError, match="has axis 'pp' and does not claim that level"):
        replace(REGISTRATION, capabilities=replace(REGISTRATION.capabilities, axes=("pp",)))
    with pytest.raises(sw.ShardwrightError, match="did you mean 'torch'"):
        registry.load("troch")


def test_a_backend_whose_module_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named = replace(REGISTRATION.capabilities, framework="broken")
    gone = replace(REGISTRATION, capabilities=named, module="tests.no_such_backend", owns=lambda model: False)
    monkeypatch.setitem(registry._others, "broken", gone)
    with pytest.raises(sw.ShardwrightError, match=r"'broken' has no BACKEND .* tests\.no_such_backend: ModuleNotFound"):
        registry.load("broken")
    monkeypatch.setitem(registry._others, "broken", replace(gone, needs=("no_such_framework",)))
    with pytest.raises(sw.ShardwrightError, match="needs no_such_framework, which cannot be imported"):
        registry.load("broken")


def test_an_entry_point_that_does_not_load_takes_no_other_backend_away(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "tests.no_such_backend:REGISTRATION", registry.GROUP)
    here = EntryPoint("here", "tests.numpy_backend:REGISTRATION", registry.GROUP)
    monkeypatch.setattr(registry, "_others", {})
    monkeypatch.setattr(registry, "_looked_for", [])
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken, here])
    with pytest.warns(UserWarning, match="the backend 'broken' .* cannot be used: ModuleNotFoundError"):
        found = list(registered())
    assert found == ["numpy", "torch", "jax"]
