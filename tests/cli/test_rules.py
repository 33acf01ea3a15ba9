"""`rules_command`: the coverage of the example models."""

import json

import pytest

from shardwright.commands.rules import rules_command
from shardwright.core.rules.coverage import coverage
from tests.core.toy import decoder


def test_coverage_of_a_decoder() -> None:
    found = coverage([decoder(layers=1)])
    by_name = {op.name: op for op in found.ops}
    assert by_name["mm"].kind == "contraction"
    assert by_name["mm"].rules >= 5
    assert by_name["mm"].flops > 0
    assert found.fallback_flops_share == found.fallback_bytes_share == 0


@pytest.mark.slow
def test_the_example_models_have_rules(capsys: pytest.CaptureFixture[str]) -> None:
    rules_command(json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["missing"] == []
    for framework in ("torch", "jax"):
        assert said[framework]["fallback_flops_share"] < 0.01
        assert said[framework]["fallback_bytes_share"] < 0.01
        kinds = {op["kind"] for op in said[framework]["ops"]}
        assert {"contraction", "attention", "elementwise", "gather", "softmax"} <= kinds
