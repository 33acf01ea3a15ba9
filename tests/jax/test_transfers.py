"""Arrays between stages: the same as by `jax.device_put`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.backends.jax.compat import direct_copy
from shardwright.backends.jax.pipeline import transfers
from shardwright.backends.jax.pipeline.transfers import Route
from tests.comparison import Comparison


def meshes(devices: int) -> list[Mesh]:
    given = np.array(jax.devices()[: 2 * devices]).reshape(2, devices, 1)
    return [Mesh(half, ("dp", "tp")) for half in given]


def placed(mesh: Mesh, *axes: str | None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*axes))


@pytest.fixture(params=["as JAX has it", "without"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(transfers, "direct_copy", lambda: None)


def test_this_jax_has_the_short_way() -> None:
    assert direct_copy() is not None


def test_it_is_tried_from_one_device_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, targets = xla_client.batched_copy_array_to_devices_with_sharding, []

    def seen(arrays: Any, devices: Any, shardings: Any, *given: Any) -> Any:
        targets.extend(zip(arrays, shardings, strict=True))
        return copy(arrays, devices, shardings, *given)

    monkeypatch.setattr(xla_client, "batched_copy_array_to_devices_with_sharding", seen)
    assert direct_copy.__wrapped__() is not None
    ((array, target),) = targets
    assert not array.sharding.device_set & target.device_set


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("UNIMPLEMENTED: CopyArrays"), TypeError("5 arguments")])
def test_a_jax_that_refuses_it_copies_by_device_put(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*given: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(xla_client, "batched_copy_array_to_devices_with_sharding", refuse)
        found_way = direct_copy.__wrapped__()
    assert found_way is None
    monkeypatch.setattr(transfers, "direct_copy", lambda: found_way)
    one, other = meshes(2)
    array = jax.device_put(jnp.arange(4.0), placed(one, "dp"))
    (found,) = Route([array], [array.sharding], [placed(other, "dp")])([array])
    assert found.sharding == placed(other, "dp")
    Comparison().equal(found, np.arange(4, dtype=np.float32)).require()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("axes", [((), ()), (("dp",), ("dp",)), ((None, "dp"), ("dp",)), ((), (None, "dp"))])
def test_arrays_arrive_as_by_device_put(devices: int, axes: tuple[tuple[str | None, ...], ...]) -> None:
    one, other = meshes(devices)
    arrays = [jax.device_put(jnp.arange(24.0).reshape(4, 6) + n, placed(one, *axes[0])) for n in range(2)]
    targets = [placed(other, *axes[1])] * 2
    wanted = jax.device_put(arrays, targets)
    found = Route(arrays, [a.sharding for a in arrays], targets)(arrays)
    for array, same in zip(found, wanted, strict=True):
        assert (array.sharding, array.committed, array.aval) == (same.sharding, same.committed, same.aval)
        for shard, own in zip(array.addressable_shards, same.addressable_shards, strict=True):
            assert shard.device == own.device
            Comparison().equal(shard.data, own.data).require()


@pytest.mark.usefixtures("kept")
def test_arrays_from_elsewhere_than_expected_arrive_too() -> None:
    one, other = meshes(2)
    array = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    route = Route([array], [placed(one, "dp")], [placed(other, "dp")])
    given = [array, jax.device_put(array, placed(one, None, "dp")), jnp.asarray(array)]
    for leaf in given:
        (found,) = route([leaf])
        assert found.sharding == placed(other, "dp")
        Comparison().equal(found, array).require()


def test_random_keys_arrive() -> None:
    one, other = meshes(2)
    key = jax.device_put(jax.random.key(3), placed(one))
    (found,) = Route([key], [key.sharding], [placed(other)])([key])
    assert found.sharding == placed(other)
    Comparison().equal(jax.random.key_data(found), jax.random.key_data(key)).require()


def test_what_lies_there_is_handed_on() -> None:
    at = placed(meshes(2)[0], "dp")
    array = jax.device_put(jnp.ones((4, 6)), at)
    assert Route([array], [at], [at])([array])[0] is array


def test_what_was_used_up_does_not_travel() -> None:
    one, other = meshes(1)
    array = jax.device_put(jnp.ones(3), placed(one))
    route = Route([array], [array.sharding], [placed(other)])
    array.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        route([array])
