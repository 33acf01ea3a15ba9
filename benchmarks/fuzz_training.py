"""Spoilt settings of PyTorch's runtime, and spoilt arguments, models and batches of JAX's: cases as in `fuzz_cases`.

A step of JAX that is taken must give the loss of the plain function.
"""

import copy
import os
import random
from collections.abc import Sequence
from functools import cache
from typing import Any


def prepare(kind: str) -> None:
    """Import, and plan, what takes seconds, and no case's time."""
    if kind == "settings":
        import shardwright.torch  # noqa: F401
    if kind == "JAX arguments":
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        _plans()


def settings(rng: random.Random, strange: Sequence[Any]) -> str:
    """The keys of `shardwright.torch.init`."""
    from shardwright.torch.config import Config, read_config

    usual = {
        "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 4, "pipeline": "interleaved",
        "virtual_stages": 2, "active_microbatches": 2, "ddp": True, "ddp_dist_backend": "gloo",
        "placement_strategy": "spread",
        "cluster": "h100", "recompute": "full", "prescaled_batch": False, "optimize": "memory", "loss_scope": "global",
        "compile": "eager", "seed": 3, "wait_timeout_s": 5.0, "layouts": "auto", "pipeline_mode": "messages",
    }  # fmt: skip
    names = rng.sample(sorted(usual), rng.choice((1, 2, 4)))
    given = {name: usual[name] if rng.random() < 0.4 else copy.deepcopy(rng.choice(strange)) for name in names}
    if rng.random() < 0.1:
        given[rng.choice(["typo", "", 7, None])] = 1
    config: Config = read_config(given)
    if config.pipeline != "auto":
        schedule = config.schedule(None)
        if config.pipeline_parallel_degree == 1 and schedule.ranks != 1:
            return "ranks that are not there"
    config.mesh(config.pipeline_parallel_degree * config.tensor_parallel_degree)
    return ""


def _loss(params: Any, batch: Any) -> Any:
    import jax.numpy as jnp

    hidden = jnp.tanh(batch["x"] @ params["first"]["w"])
    return jnp.mean(jnp.square(hidden @ params["last"]["w"] + params["last"]["b"] - batch["y"]))


def _params() -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    first, last = rng.normal(size=(4, 4)).astype("float32"), rng.normal(size=(4, 2)).astype("float32")
    return {"first": {"w": first}, "last": {"w": last, "b": np.zeros(2, "float32")}}


def _batch(samples: int = 8) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(samples, 4)).astype("float32"),
        "y": rng.normal(size=(samples, 2)).astype("float32"),
    }


@cache
def _plans() -> tuple[Any, ...]:
    import shardwright.jax as sw

    graph = sw.capture(_loss, (_params(), _batch()))
    usual = {"batch": 8, "schedule": "gpipe"}
    made = ({"dp": 2, "microbatch": 2}, {"tp": 2, "microbatch": 4}, {"pp": 2, "microbatch": 4}, {"microbatch": 8})
    degrees = {"pp": 1, "dp": 1, "tp": 1}
    plans = []
    for pins in made:
        decision = usual | degrees | pins
        world = decision["pp"] * decision["dp"] * decision["tp"]
        plans.append(sw.plan(graph, sw.Cluster("cpu", devices_per_node=world), **decision))
    return tuple(plans)


def _spoilt(rng: random.Random, tree: Any, strange: Sequence[Any]) -> Any:
    """A nested dict with one thing in it another."""
    import numpy as np

    if not isinstance(tree, dict) or not tree or rng.random() < 0.1:
        array = np.asarray(tree) if not isinstance(tree, dict) else np.ones(3, "float32")
        return rng.choice(
            [
                copy.deepcopy(rng.choice(strange)), array.astype("int32"), array.astype("float64"), array[..., None],
                array[:0], array[:1], np.concatenate([array, array]), array.astype(object), array * float("nan"),
                array.astype("complex64"), array.tolist(), array.astype("bool"), array.T,
            ]
        )  # fmt: skip
    changed = dict(tree)
    name = rng.choice(sorted(changed, key=str))
    match rng.random():
        case chance if chance < 0.1:
            del changed[name]
        case chance if chance < 0.2:
            changed[rng.choice(["more", "", 7, None, "\x1b[31m"])] = changed[name]
        case _:
            changed[name] = _spoilt(rng, changed[name], strange)
    return changed


def _answering(function: Any) -> Any:
    """What the user's own function raises is the user's."""
    import shardwright.jax as sw

    if function is not _loss:
        return function

    def loss(params: Any, batch: Any) -> Any:
        try:
            return _loss(params, batch)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise sw.ShardwrightError(f"the function's own: {error!r}") from error

    return loss


def jax_arguments(rng: random.Random, strange: Sequence[Any]) -> str:
    """What `shardwright.jax.train_step`, `TrainStep.init` and a step are given."""
    import jax
    import numpy as np
    import optax

    import shardwright.jax as sw

    usual: dict[str, Any] = {
        "batch_dims": None, "one_program": False, "has_aux": False, "wrt": None, "reduction": "mean",
        "nonfinite": "ignore", "debug": None,
    }  # fmt: skip
    plan, function, optimizer = rng.choice(_plans()), _loss, optax.sgd(0.1)
    given: dict[str, Any] = {name: usual[name] for name in rng.sample(sorted(usual), rng.choice((0, 1, 2)))}
    given["devices"] = jax.devices()[: plan.mesh.size]
    params, batch = _params(), _batch(rng.choice((8, 8, 8, 4, 7, 16, 1, 0)))
    for _ in range(rng.choice((0, 1, 1, 2))):
        match rng.choice(["option", "option", "function", "optimizer", "plan", "params", "batch", "batch"]):
            case "option":
                given[rng.choice([*usual, "devices"])] = copy.deepcopy(rng.choice(strange))
            case "function":
                function = copy.deepcopy(rng.choice(strange))
            case "optimizer":
                optimizer = copy.deepcopy(rng.choice([*strange, optax.adam]))
            case "plan":
                plan = copy.deepcopy(rng.choice(strange))
            case "params":
                params = _spoilt(rng, params, strange)
            case "batch":
                batch = _spoilt(rng, batch, strange)
    train = sw.train_step(_answering(function), optimizer, plan, **given)
    before = copy.deepcopy(params)
    _, loss = train(train.init(params), batch)
    found, expected = float(loss), float(_loss(before, batch))
    if not np.isclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True) and given.get("reduction") != "sum":
        return f"a loss of {found}, and the plain function gives {expected}"
    return ""
