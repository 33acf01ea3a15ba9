"""Ops between units run on the same stages in both frameworks: where the fewest bytes cross, as the plan counts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

torch = pytest.importorskip("torch")

import shardwright.jax as sw  # noqa: E402
from shardwright.backends.torch.program.stages import divide  # noqa: E402
from shardwright.backends.torch.program.step_recorder import record  # noqa: E402

BATCH, WIDTH = 4, 8

Between = Callable[[Any, Any], Any]
"""What happens to the first layer's result; given the framework's namespace."""
BETWEEN: dict[str, tuple[int, int, Between, int]] = {
    "widens": (WIDTH, 4 * WIDTH, lambda n, h: n.concatenate([h, h + 1, h * 2, h * h], -1), WIDTH),
    "shrinks": (4 * WIDTH, WIDTH, lambda n, h: (h * h + 1).reshape(-1, 4, WIDTH).sum(1), WIDTH),
    "widens and shrinks": (
        WIDTH,
        WIDTH,
        lambda n, h: n.concatenate([h, h * h], -1).reshape(-1, 2, WIDTH).sum(1),
        WIDTH,
    ),
    "keeps its size": (WIDTH, WIDTH, lambda n, h: n.tanh(h * 2), WIDTH),
    "narrows in the middle": (4 * WIDTH, 4 * WIDTH, lambda n, h: n.concatenate([h[:, :2] * 2] * 16, -1), 2),
}
"""Widths of what the first layer makes and the second takes, what lies between, and the columns that cross at least."""


class Torch(torch.nn.Module):
    def __init__(self, made: int, taken: int, between: Between) -> None:
        super().__init__()
        self.first, self.second, self.between = torch.nn.Linear(WIDTH, made), torch.nn.Linear(taken, 1), between

    def forward(self, x: Any) -> Any:
        return self.second(self.between(torch, self.first(x))).mean()


class Flax(nnx.Module):
    def __init__(self, made: int, taken: int, between: Between) -> None:
        self.first = nnx.Linear(WIDTH, made, rngs=nnx.Rngs(0))
        self.second, self.between = nnx.Linear(taken, 1, rngs=nnx.Rngs(1)), between

    def __call__(self, x: Any) -> Any:
        return self.second(self.between(jnp, self.first(x))).mean()


def plan_of(graph: sw.Graph) -> sw.Plan:
    cluster = sw.Cluster("cpu", devices_per_node=2)
    return sw.plan(
        graph, cluster, batch=BATCH, pp=2, dp=1, tp=1, microbatch=BATCH, precision="fp32", loss_scope="replica"
    )


def sent_by_torch(made: int, taken: int, between: Between) -> tuple[sw.Plan, list[tuple[int, ...]]]:
    model, recorders = Torch(made, taken, between), []
    plan = plan_of(sw.capture(model, torch.zeros(BATCH, WIDTH)))
    stage_of_call = {(c.path, c.occurrence): s for s, calls in enumerate(plan.stage_calls("torch")) for c in calls}

    def body(inputs: list[Any]) -> None:
        recorders[-1].backward(model(inputs[0]))

    program, _ = record(model, stage_of_call, torch.device("cpu"), body, [torch.zeros(BATCH, WIDTH)], recorders.append)
    division = divide(program, stage_of_call, plan.parameter_stages("torch"), 2)
    return plan, sorted(tuple(program.values[v].shape) for edge in division.edges for v in edge.values)


def sent_by_jax(plan: sw.Plan, made: int, taken: int, between: Between) -> list[tuple[int, ...]]:
    def loss(model: Any, batch: Any) -> Any:
        return model(batch["x"])

    batch = {"x": np.ones((BATCH, WIDTH), np.float32)}
    graph = sw.capture(nnx.eval_shape(lambda: Flax(made, taken, between)), batch, loss)
    train = sw.train_step(loss, optax.sgd(0.1), plan.rebind(graph), devices=jax.devices()[:2], reduction="mean")
    train(train.init(Flax(made, taken, between)), batch)
    cut = train.pipeline.micro.cut
    return sorted(cut.flat.avals[a.value].shape for part in cut.parts for a in part.arrivals)


@pytest.mark.parametrize("name", BETWEEN)
def test_the_same_values_cross_in_both_frameworks(name: str) -> None:
    made, taken, between, columns = BETWEEN[name]
    plan, shapes = sent_by_torch(made, taken, between)
    assert sum(np.prod(shape) for shape in shapes) == BATCH * columns
    assert plan.costs.boundary_bytes[1] == 4 * BATCH * columns
    assert sent_by_jax(plan, made, taken, between) == shapes
