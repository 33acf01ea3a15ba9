"""`shardwright hardware`: what is known by name, and a file to fill in."""

import json
from pathlib import Path

from typer.testing import CliRunner

from shardwright import Cluster
from shardwright.cli import app
from shardwright.core.cluster.hardware.catalogue import link_names, preset_names, profile_names

RUNNER = CliRunner()


def test_all_names_are_listed() -> None:
    found = json.loads(RUNNER.invoke(app, ["hardware", "--json"]).stdout)
    for part, names in (("devices", profile_names()), ("links", link_names()), ("nodes", preset_names())):
        assert [entry["name"] for entry in found[part]] == list(names)
    text = RUNNER.invoke(app, ["hardware"], env={"COLUMNS": "200"}).stdout
    assert all(name in text for name in (*profile_names(), *link_names(), *preset_names()))


def test_a_file_is_written_once_and_plans(tmp_path: Path) -> None:
    place = tmp_path / "mine.toml"
    done = RUNNER.invoke(app, ["hardware", "--new", str(place), "--like", "a100-80gb"])
    assert done.exit_code == 0, done.output
    assert Cluster(str(place)).device(0).peak_flops_per_s["bf16"] == 312e12
    before = place.read_text()
    again = RUNNER.invoke(app, ["hardware", "--new", str(place)])
    assert again.exit_code != 0
    assert "there is such a file already" in again.output
    assert place.read_text() == before


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for given, said in (
        (["--like", "h100"], "--new"),
        (["--new", str(tmp_path / "mine.json")], ".toml"),
        (["--new", str(tmp_path / "no" / "mine.toml")], "no"),
        (["--new", str(tmp_path / "mine.toml"), "--like", "h10"], "h100"),
    ):
        done = RUNNER.invoke(app, ["hardware", *given])
        assert done.exit_code != 0
        assert said in done.output
        assert not list(tmp_path.iterdir())
