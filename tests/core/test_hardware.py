"""Devices, links and the files that describe them."""

import dataclasses
import math
import pickle
import tomllib
from importlib.resources import files

import pytest

from shardwright.core.cluster.hardware import (
    Device,
    Link,
    link_names,
    load_device,
    load_link,
    load_profile,
    profile_names,
)
from shardwright.core.cluster.hardware.check import ORIGINS
from shardwright.core.cluster.hardware.device import MeasuredProduct
from shardwright.core.errors import ClusterError

EXPECTED = {
    "v100", "a100-40gb", "a100-80gb", "h100", "h100-500w", "h200", "b200", "t4", "tpu-v4", "tpu-v5e", "tpu-v5p", "trn1",
    "cpu",
}  # fmt: skip


def a100_text() -> str:
    return (files("shardwright.core.cluster.hardware") / "profiles" / "a100-80gb.toml").read_text(encoding="utf-8")


def device(**changes: object) -> Device:
    return dataclasses.replace(load_device("a100-80gb"), **changes)  # type: ignore[arg-type]


def test_every_promised_profile_is_there() -> None:
    assert set(profile_names()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_profile_states_the_origin_of_every_constant(name: str) -> None:
    profile = load_profile(name)
    assert profile.device.name == name
    constants = {
        field.name
        for field in dataclasses.fields(Device)
        if isinstance(getattr(profile.device, field.name), int | float)
    }
    constants |= {f"peak_flops_per_s.{precision}" for precision in profile.device.peak_flops_per_s}
    assert constants == set(profile.device.origins)
    assert all(origin.split(":")[0] in ORIGINS for origin in profile.device.origins.values())
    for link in (profile.intra_node, profile.inter_node):
        assert set(link.origins) == {"bandwidth_bytes_per_s", "latency_s", "efficiency"}


def test_no_constant_of_the_catalogue_comes_from_a_user() -> None:
    origins = [o for name in profile_names() for o in load_device(name).origins.values()]
    origins += [o for name in link_names() for o in load_link(name).origins.values()]
    assert not [origin for origin in origins if origin.startswith("user")]


@pytest.mark.parametrize(
    ("name", "precision", "flops_per_s", "memory_bandwidth_bytes_per_s", "memory_gib"),
    [
        ("v100", "fp16", 125e12, 900e9, 32),
        ("a100-40gb", "bf16", 312e12, 1555e9, 40),
        ("a100-80gb", "tf32", 156e12, 2039e9, 80),
        ("h100", "bf16", 989.4e12, 3.35e12, 80),
        ("h100-500w", "bf16", 989.4e12, 2.4e12, 96),
        ("h200", "fp8", 1978.9e12, 4.8e12, 141),
        ("b200", "bf16", 2.25e15, 8e12, 180),
        ("t4", "fp32", 8.1e12, 320e9, 15),
        ("tpu-v4", "bf16", 275e12, 1228e9, 32),
        ("tpu-v5e", "bf16", 197e12, 819e9, 16),
        ("tpu-v5p", "bf16", 459e12, 2765e9, 95),
        ("trn1", "bf16", 95e12, 410e9, 16),
    ],
)
def test_constants_are_those_of_the_data_sheets(
    name: str, precision: str, flops_per_s: float, memory_bandwidth_bytes_per_s: float, memory_gib: int
) -> None:
    known = load_device(name)
    assert known.flops_per_s(precision) == flops_per_s
    assert known.memory_bandwidth_bytes_per_s == memory_bandwidth_bytes_per_s
    assert known.memory_bytes == memory_gib * 2**30


def test_link_bandwidths_are_of_one_direction() -> None:
    assert load_link("nvlink3").bandwidth_bytes_per_s == 600e9 / 2
    assert load_link("ib-hdr200").bandwidth_bytes_per_s == 200e9 / 8
    assert load_link("efa-400g").sharing == "node"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ClusterError, match=r"'a100-80g' is not known; did you mean 'a100-80gb'"):
        load_profile("a100-80g")
    with pytest.raises(ClusterError, match=r"link 'nvlink-3' is not known; did you mean 'nvlink3'"):
        load_link("nvlink-3")


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"'v100' has no 'bf16' matrix products; .*known: fp16, fp32"):
        load_device("v100").flops_per_s("bf16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes must be an integer of at least 1; given 0"),
        ({"memory_bytes": 8e10}, "memory_bytes must be an integer of at least 1; given 80000000000.0"),
        ({"memory_bandwidth_bytes_per_s": math.nan}, "memory_bandwidth_bytes_per_s must be a finite number above 0"),
        ({"kernel_launch_s": -1e-6}, "kernel_launch_s must be a finite number at least 0"),
        ({"matmul_efficiency": 1.2}, "matmul_efficiency must be a finite number above 0 and at most 1; given 1.2"),
        ({"memory_efficiency": 0}, "memory_efficiency must be a finite number above 0"),
        ({"peak_flops_per_s": {}}, "peak_flops_per_s must name at least one of fp32"),
        ({"peak_flops_per_s": {"bf61": 1e12}}, "precision 'bf61' is not known; did you mean 'bf16'"),
        ({"peak_flops_per_s": {"bf16": math.inf}}, "peak_flops_per_s.bf16 must be a finite number"),
        ({"peak_flops_per_s": {"bf16": True}}, "peak_flops_per_s.bf16 must be a finite number"),
        ({"peak_flops_per_s": {16: 1e12}}, "precision 16 is not known"),
        (
            {"peak_flops_per_s": 312e12},
            "peak_flops_per_s gives a peak for each precision, {'bf16': NUMBER}; given 3",
        ),
        ({"reserved_memory_bytes": 2**40}, "must be below memory_bytes"),
        ({"kind": "gpus"}, "kind 'gpus' is not known; did you mean 'gpu'"),
        ({"price_usd_per_hour": -1.0}, "price_usd_per_hour must be"),
        ({"origins": {"memory_bytes": "a web page"}}, "the origin of memory_bytes must read"),
    ],
)
def test_an_impossible_device_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        device(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s must be a finite number above 0"),
        ({"latency_s": -1.0}, "latency_s must be a finite number at least 0"),
        ({"efficiency": 1.01}, "efficiency must be"),
        ({"sharing": "rack"}, "sharing 'rack' is not known"),
    ],
)
def test_an_impossible_link_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        dataclasses.replace(load_link("nvlink3"), **changes)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_values_can_be_hashed_pickled_and_not_changed() -> None:
    known = load_device("h100")
    assert pickle.loads(pickle.dumps(known)) == known
    assert hash(pickle.loads(pickle.dumps(known))) == hash(known)
    with pytest.raises(dataclasses.FrozenInstanceError):
        known.memory_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        known.peak_flops_per_s["bf16"] = 1.0  # type: ignore[index]


def test_machines_of_ones_own_cost_nothing(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(a100_text().replace("value = 5.1207", "value = 0"))
    assert load_profile(path).device.price_usd_per_hour == 0
    assert device(price_usd_per_hour=0.0).price_usd_per_hour == 0


def test_a_profile_file_of_ones_own(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(a100_text().replace('name = "a100-80gb"', 'name = "mine"').replace("nvlink3", "pcie4"))
    profile = load_profile(path)
    assert profile == load_profile(str(path))
    assert (profile.device.name, profile.intra_node.name) == ("mine", "pcie4")
    assert dataclasses.replace(profile.device, name="a100-80gb") == load_device("a100-80gb")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes = { value = 85_899_345_920", "memory_bytes = { value = 80", "memory_bytes: 80 is not plausible"),
        ("value = 312e12, origin", "value = 312, origin", "peak_flops_per_s.bf16: 312 is not plausible"),
        ("value = 5.1207", "value = 5120700", "price_usd_per_hour: 5.1207e+06 is not plausible"),
        (
            '{ value = 2039e9, origin = "data sheet: 2,039 GB/s" }',
            '"2,039 GB/s"',
            "memory_bandwidth_bytes_per_s: expected a number and where it comes from",
        ),
        ("value = 2039e9", "value = -2039e9", "memory_bandwidth_bytes_per_s: -2.039e+12 is not plausible"),
        ("value = 2039e9", "value = inf", "memory_bandwidth_bytes_per_s.value: Input should be a finite number"),
        ("value = 2039e9", 'value = "2039 GB/s"', "memory_bandwidth_bytes_per_s.value: Input should be a valid number"),
        ("85_899_345_920", "85899345920.5", "memory_bytes: must be a whole number of bytes"),
        (", origin = \"data sheet: 19.5 TFLOPS\"", "", "peak_flops_per_s.fp32.origin: missing"),
        ("data sheet: 19.5 TFLOPS", "", "peak_flops_per_s.fp32.origin: String should have at least 1 character"),
        ("data sheet: 19.5 TFLOPS", "I think so", "origin of peak_flops_per_s.fp32 must read"),
        ("memory_bytes = {", "memory_byte = {", "memory_byte: unknown key; did you mean 'memory_bytes'"),
        ("inter_node =", "internode =", "links.internode: unknown key; did you mean 'inter_node'"),
        ("value = 4.0e-6", "val = 4.0e-6", "kernel_launch_s.val: unknown key; did you mean 'value'"),
        ("ib-hdr200", "ib-hdr20", "links: link 'ib-hdr20' is not known; did you mean 'ib-hdr200'"),
        ("fp32 =", "fp23 =", "precision 'fp23' is not known; did you mean 'fp32'"),
        ("format = 1", "format = 2", "format 2 is newer than this version reads (1)"),
        ("format = 1", "", "format: missing"),
        ("[links]", "[links", "is not a TOML hardware profile"),
        ("format = 1", "format = 0", "there is no format 0; this version reads format 1"),
        ("matmul_efficiency = {", "matmul_efficency = {", "matmul_efficiency: missing; add matmul_efficiency = { val"),
        ("value = 0.882", "value = 86.8", "matmul_efficiency: 86.8 is not plausible, expected 0.001 to 1; the unit"),
        ("value = 0.882", "value = 1e-30", "matmul_efficiency: 1e-30 is not plausible"),
        ("value = 108", "value = 1e300", "compute_units: 1e+300 is not plausible, expected 1 to 100000; the unit is"),
        ("value = 61", "value = -1", "tile_depth: -1 is not plausible, expected 0 to 4096; the unit is contracted"),
        (
            'inter_node = "ib-hdr200"',
            "inter_node = { bandwidth_bytes_per_s = 25e9, latency_s = 9.6 }",
            "links.inter_node: custom.latency_s: 9.6 is not plausible, expected 0 to 1; the unit is seconds",
        ),
        (
            "[links]",
            '[[products]]\nprecision = "bf16"\nm = 1\nn = 1\nk = 1\nflops_per_s = 250.0\n[links]',
            "products.0.flops_per_s: 250 is not plausible",
        ),
    ],
)  # fmt: skip
def test_a_faulty_profile_file_is_refused_with_the_path_inside_it(tmp_path, old: str, new: str, message: str) -> None:
    assert old in a100_text()
    path = tmp_path / "faulty.toml"
    path.write_text(a100_text().replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_profile_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read the hardware profile .*No such file"):
        load_profile(tmp_path / "none.toml")


def test_a_file_that_is_not_text(tmp_path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match=r"cannot read the hardware profile .* not text in UTF-8"):
        load_profile(path)


def test_the_catalogue_is_plain_toml() -> None:
    for name in profile_names():
        text = (files("shardwright.core.cluster.hardware") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
        assert tomllib.loads(text)["name"] == name


def test_a_scaled_link_keeps_all_but_its_bandwidth() -> None:
    link = Link("mine", bandwidth_bytes_per_s=10e9, latency_s=1e-6, efficiency=0.5)
    assert link.effective_bandwidth_bytes_per_s == 5e9
    assert link.scaled(4) == dataclasses.replace(link, bandwidth_bytes_per_s=40e9)
    assert link.scaled(1.0) is link


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"flops_per_s": 0.0}, "flops_per_s"),
        ({"flops_per_s": math.nan}, "flops_per_s"),
        ({"m": 0}, "m must"),
        ({"n": 1.5}, "n must"),
        ({"precision": "fp31"}, "did you mean 'fp32'"),
    ],
)
def test_a_measured_product_that_cannot_be_is_refused(changed: dict[str, object], match: str) -> None:
    MeasuredProduct("fp32", 2, 3, 4, 1e9)
    with pytest.raises(ClusterError, match=match):
        MeasuredProduct(**({"precision": "fp32", "m": 2, "n": 3, "k": 4, "flops_per_s": 1e9} | changed))
