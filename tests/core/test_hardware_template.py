"""A hardware file to start from: complete, explained, and equal to the device that it was taken from."""

import re
import tomllib
from pathlib import Path

import pytest

from shardwright import Cluster
from shardwright.core.cluster.hardware.catalogue import load_profile, profile_names, profile_of
from shardwright.core.cluster.hardware.profile_fields import DeviceTable, UserLinkTable
from shardwright.core.cluster.hardware.template import MEANINGS, template
from shardwright.core.errors import ClusterError


@pytest.mark.parametrize("name", profile_names())
def test_the_file_holds_the_constants_of_the_device(name: str) -> None:
    known = load_profile(name)
    found = profile_of(tomllib.loads(template(name, "mine.toml")), "mine.toml")
    for field in DeviceTable.model_fields:
        if field not in ("name", "summary"):
            assert getattr(found.device, field) == getattr(known.device, field), field
    for link, other in ((found.intra_node, known.intra_node), (found.inter_node, known.inter_node)):
        for field in ("bandwidth_bytes_per_s", "latency_s", "efficiency", "sharing"):
            assert getattr(link, field) == getattr(other, field), field
    assert set(found.device.origins.values()) == {f"derived: taken from {name}"}


@pytest.mark.parametrize("name", profile_names())
def test_every_constant_is_explained(name: str) -> None:
    assert {*DeviceTable.model_fields, *UserLinkTable.model_fields} == set(MEANINGS)
    lines = template(name, "mine.toml").splitlines()
    for field in DeviceTable.model_fields:
        at = next(n for n, line in enumerate(lines) if re.match(rf"(# )?\[?{field}\b[\] ]", line))
        assert lines[at - 1] == f"# {MEANINGS[field]}"


def test_a_changed_file_is_another_device(tmp_path: Path) -> None:
    place = tmp_path / "mine.toml"
    text = template("t4", str(place))
    place.write_text(
        re.sub(r"^memory_bytes = .*$", 'memory_bytes = { value = 2e10, origin = "user: counted" }', text, flags=re.M)
    )
    cluster = Cluster(str(place), nodes=2, devices_per_node=8)
    assert cluster.device(0).memory_bytes == 2e10
    assert cluster.device(0).name == "my-t4"


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(ClusterError, match="h100"):
        template("h10", "mine.toml")
