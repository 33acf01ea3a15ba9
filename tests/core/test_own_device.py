"""Files of devices of one's own, filled in as users do: plain numbers, other units, links left out."""

import re
from pathlib import Path

import pytest

from shardwright import Cluster
from shardwright.core.cluster.hardware import load_profile, profile_names
from shardwright.core.cluster.hardware.profile_fields import PLAIN_NUMBER
from shardwright.core.cluster.hardware.template import template
from shardwright.core.errors import ClusterError


def filled(tmp_path: Path, *edits: tuple[str, str], like: str = "h100") -> Path:
    """The file that ``shardwright hardware --new`` writes, edited: a pattern and what replaces it."""
    text = template(like, "mine.toml")
    for old, new in edits:
        text, count = re.subn(old, new, text, flags=re.M | re.S)
        assert count, old
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def set_to(name: str, value: str) -> tuple[str, str]:
    return rf"^{name} = \{{ value = [\d.e+-]+", f"{name} = {{ value = {value}"


NO_LINKS = (r"# The link between the devices.*", "")


def test_plain_numbers_are_taken(tmp_path: Path) -> None:
    plain = [(rf"^{name} = \{{[^\n]*", f"{name} = {value}") for name, value in (
        ("memory_bytes", "80e9"), ("bf16", "800e12"), ("kernel_launch_s", "4e-6"), ("latency_s", "2e-6"),
    )]  # fmt: skip
    edits = [*plain, (r"^# optimizer_efficiency =", "optimizer_efficiency = 0.5")]
    cluster = Cluster(filled(tmp_path, *edits), nodes=2, devices_per_node=8)
    device = cluster.device(0)
    assert (device.memory_bytes, device.flops_per_s("bf16")) == (80_000_000_000, 800e12)
    assert (device.kernel_launch_s, device.optimizer_efficiency) == (4e-6, 0.5)
    assert device.origins["memory_bytes"] == PLAIN_NUMBER
    assert cluster.groups[0].intra_node.latency_s == 2e-6
    assert Cluster.from_document(cluster.to_document()) == cluster


def test_links_are_given_by_name(tmp_path: Path) -> None:
    links = '[links]\nintra_node = "nvlink4"\ninter_node = "ethernet-100g"\n'
    cluster = Cluster(filled(tmp_path, (NO_LINKS[0], links)), nodes=2, devices_per_node=8)
    assert cluster.inter_node is not None
    assert cluster.inter_node.name == "ethernet-100g"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (set_to("memory_bytes", "80"), r"memory_bytes: 80 is not plausible, expected 1e\+08 to .*80 GB are 8e\+10"),
        (set_to("reserved_memory_bytes", "2"), r"reserved_memory_bytes: 2 is not plausible.* 2 GB are 2e\+09"),
        (set_to("bf16", "989"), r"peak_flops_per_s\.bf16: 989 is not plausible.*989 TFLOP/s are 9\.89e\+14"),
        (set_to("bf16", "989e9"), r"peak_flops_per_s\.bf16: 9\.89e\+11 is 0\.295 FLOPs for each byte.*expected"),
        (set_to("memory_bandwidth_bytes_per_s", "3350e6"), r"tf32 \(and bf16, fp16, fp8\): .* one is in another unit"),
        (set_to("host_link_bandwidth_bytes_per_s", "6.3e13"), r"host_link_bandwidth_bytes_per_s: 6\.3e\+13 is not"),
        (set_to("bandwidth_bytes_per_s", "400"), r"links\.inter_node: .*400 is not plausible.*400 Gb/s are 5e\+10"),
        (set_to("bandwidth_bytes_per_s", "4e13"), r"links\.intra_node\.bandwidth_bytes_per_s: 4e\+13 is not"),
        (set_to("latency_s", "3.4"), r"latency_s: 3\.4 is not plausible.*3\.4 µs are 3\.4e-06"),
        (set_to("matmul_efficiency", "70"), r"matmul_efficiency: 70 is not plausible.*70 percent are 0\.7"),
        (NO_LINKS, r"links: missing; add \[links\] with intra_node and inter_node, each a name"),
        ((r"# The link between nodes.*", ""), r"links\.inter_node: missing; add the link between nodes"),
        ((r"^latency_s = [^\n]*\n", ""), r"links\.intra_node\.latency_s: missing; add latency_s = SECONDS"),
        (('^kind = "gpu"', 'kind = "other"'), r"kind: Input should be 'gpu', 'tpu', 'trainium' or 'cpu'"),
        (set_to("memory_bytes", "nan"), "memory_bytes.value: Input should be a finite number"),
        ((r"^memory_bytes = [^\n]*", "memory_bytes = true"), "memory_bytes: expected a number and where it comes from"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_range_and_the_fix(tmp_path: Path, edit: tuple[str, str], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        load_profile(filled(tmp_path, edit))


def test_all_faults_are_said_at_once(tmp_path: Path) -> None:
    edits = (set_to("memory_bytes", "80"), set_to("bf16", "989"), set_to("bandwidth_bytes_per_s", "400"))
    with pytest.raises(ClusterError) as caught:
        load_profile(filled(tmp_path, *edits))
    named = ("memory_bytes: 80", "bf16: 989", "my-nvlink4.bandwidth_bytes_per_s: 400", "my-ib-ndr400.bandwidth")
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize(
    ("peak", "said"), [("3e12", "is below the 1e\\+13 that a measured product"), (None, "add one")]
)
def test_a_peak_below_a_measured_product_is_refused(tmp_path: Path, peak: str | None, said: str) -> None:
    product = '[[products]]\nprecision = "fp8"\nm = 64\nn = 64\nk = 64\nflops_per_s = 1e13\n\n[links.intra_node]'
    edit = set_to("fp8", peak) if peak else (r"^fp8 = [^\n]*\n", "")
    with pytest.raises(ClusterError, match=said):
        load_profile(filled(tmp_path, edit, (r"^\[links\.intra_node\]", product)))


@pytest.mark.parametrize("name", profile_names())
def test_every_device_of_the_catalogue_is_plausible(tmp_path: Path, name: str) -> None:
    assert load_profile(filled(tmp_path, (r"^format = 1", "format = 1"), like=name)).device.name == f"my-{name}"
