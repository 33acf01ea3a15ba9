"""What a machine measured becomes a profile that a cluster takes."""

from pathlib import Path

import pytest

from shardwright import Cluster
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.cluster.hardware.collective_table import MeasuredCollective
from shardwright.core.cluster.hardware.device import MeasuredProduct, MeasuredUnit
from shardwright.core.cluster.hardware.measurements import Measurements, rate_of, ring_constants
from shardwright.core.cost.matrix_products import product_s
from shardwright.core.errors import ClusterError

PRODUCTS = (MeasuredProduct("fp32", 64, 64, 64, 10e9), MeasuredProduct("fp32", 512, 512, 512, 50e9))


def measurements(**changes: object) -> Measurements:
    given = {
        "name": "here",
        "kind": "cpu",
        "measured_on": "a test",
        "memory_bytes": 8 << 30,
        "products": PRODUCTS,
        "memory_bandwidth_bytes_per_s": 12e9,
        "vector_efficiency": 0.3,
        "optimizer_efficiency": 0.2,
        "kernel_launch_s": 9e-6,
        "host_link_bandwidth_bytes_per_s": 12e9,
    }
    return Measurements(**(given | changes))


def ring_s(size: int, ranks: int, latency_s: float, bandwidth: float) -> float:
    return 2 * (ranks - 1) * (latency_s + size / ranks / bandwidth)


def test_the_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    measurements().save(tmp_path / "here.toml")
    profile = load_profile(tmp_path / "here.toml")
    device = profile.device
    assert device.measured_products == PRODUCTS
    assert device.flops_per_s("fp32") == 50e9
    assert device.dispatched_s == 9e-6
    assert device.vector_bandwidth_bytes_per_s == pytest.approx(12e9 * 0.3)
    assert all(origin.startswith("measured: ") for origin in device.origins.values())
    assert Cluster(tmp_path / "here.toml", devices_per_node=2).device(1) == device


def test_units_come_back_with_all_that_is_said_of_them(tmp_path: Path) -> None:
    units = (
        MeasuredUnit("torch:digest", 0, "fp32", 4, 0.5, 1.0, step_s=0.25, update_share=0.5),
        MeasuredUnit("jax:digest", 1, "fp32", 4, 0.5, 1.0, 2, "split", in_stages=True, idle_lent=0.75),
    )
    measurements(units=units).save(tmp_path / "here.toml")
    assert load_profile(tmp_path / "here.toml").device.measured_units == units


def test_links_are_those_of_the_group(tmp_path: Path) -> None:
    sizes = (1 << 10, 1 << 16, 1 << 22)
    samples = tuple(MeasuredCollective("all_reduce", 4, n, ring_s(n, 4, 20e-6, 3e9)) for n in sizes)
    measurements(ranks=4, collectives=samples).save(tmp_path / "here.toml")
    link = load_profile(tmp_path / "here.toml").intra_node
    assert link.latency_s == pytest.approx(20e-6, rel=1e-6)
    assert link.effective_bandwidth_bytes_per_s == pytest.approx(3e9, rel=1e-6)


def test_predictions_use_measured_products(tmp_path: Path) -> None:
    measurements().save(tmp_path / "here.toml")
    device = load_profile(tmp_path / "here.toml").device
    assert product_s(device, "fp32", 3, 512, 512, 512, 10**12) == pytest.approx(3 * 2 * 512**3 / 50e9)
    between = 2 * 200**3 / product_s(device, "fp32", 1, 200, 200, 200, 0)
    assert 10e9 < between < 50e9


def test_rates_lie_between_those_measured() -> None:
    known = {(64, 64, 64): 10e9, (512, 512, 512): 50e9}
    assert rate_of(known, 64, 64, 64) == 10e9
    rates = [rate_of(known, n, n, n) for n in (64, 128, 256, 512)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"products": ()}, "no matrix product"),
        ({"kernel_launch_s": 0.0}, "kernel_launch_s must be"),
        ({"ranks": 2}, "2 ranks and 0 all-reduces"),
    ],
)
def test_figures_that_cannot_be_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        measurements(**changes)


def test_all_reduces_that_do_not_grow_are_refused() -> None:
    samples = [MeasuredCollective("all_reduce", 2, n, s) for n, s in ((1024, 2e-3), (1 << 24, 1e-3))]
    with pytest.raises(ClusterError, match="do not take longer for more bytes"):
        ring_constants(samples)
