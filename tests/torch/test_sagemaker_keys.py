"""Every key of SageMaker's configuration has an effect, and a test of it. `python -m tests.torch.test_sagemaker_keys`
prints the table."""

import ast
import functools
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwright.torch as sw
from shardwright.compat import keys
from shardwright.torch.config import read_config
from tests.torch.launch import ROOT

HERE, COMPAT, SHARDED = "test_sagemaker_keys.py", "test_compat.py", "test_sharded_state.py"
MODEL, PLACED, VALUES = (f"workers/{name}.py" for name in ("sagemaker_model", "placed_by_hand", "step_values"))
LIMITS = SHARDED, "test_sagemakers_limits_bound_what_is_whole_and_what_is_summed_at_once"
AHEAD = "test_memory_policies.py", "test_a_backward_brings_each_storage_back_once_and_the_units_before_ahead"
EFFECTS: dict[str, tuple[str, str, str]] = {
    "pipeline_parallel_degree": (
        "a rank holds some of the parameters", MODEL, "a_hook_runs_once_between_the_split_and_the_first_step",
    ),
    "partitions": ("the same, by its older name", COMPAT, "test_a_script_runs_with_no_line_changed"),
    "tensor_parallel_degree": ("parameters are divided", MODEL, "parts_are_found_by_their_rank"),
    "microbatches": ("a step gives as many values", VALUES, "numbers_come_once_for_each_microbatch"),
    "pipeline": ("the order of actions", HERE, "test_the_order_of_actions"),
    "active_microbatches": ("most activations that are alive", HERE, "test_the_order_of_actions"),
    "optimize": ("sequences are divided, or whole", "workers/tp_training.py", "train"),
    "memory_weight": ("other stages", PLACED, "the_tree_weighs_memory_against_time"),
    "placement_strategy": ("the groups", "test_groups.py", "test_groups_follow_the_order_of_the_letters"),
    "ddp": ("replicas, which are refused without it", HERE, "test_replicas_and_their_messages"),
    "ddp_dist_backend": ("the backend of messages", HERE, "test_replicas_and_their_messages"),
    "prescaled_batch": ("whose samples a step is over", MODEL, "the_alias_averages_sums_over_ranks"),
    "shard_optimizer_state": ("states are divided over replicas", HERE, "test_what_replicas_divide"),
    "sharded_data_parallel_degree": ("parameters are, in groups", HERE, "test_what_replicas_divide"),
    "sdp_reduce_bucket_size": ("entries that are summed at once", *LIMITS),
    "sdp_param_persistence_threshold": ("parameters that stay whole", *LIMITS),
    "sdp_max_live_parameters": ("parameters that are whole at once", *LIMITS),
    "sdp_hierarchical_allgather": ("gathers between nodes and within them", "workers/node_stages.py", "trained"),
    "sdp_gradient_clipping": ("the norm that is stepped by", "workers/sharded_state.py", "clipped"),
    "offload_activations": ("activations are on the host", "workers/own_checkpoints.py", "blocks_go_to_the_host"),
    "activation_loading_horizon": ("units that come back ahead", *AHEAD),
    "fp16": ("gradients overflow, and steps are skipped", "workers/overflow.py", "trained"),
    "bf16": ("losses are those of bfloat16", MODEL, "a_model_made_in_16_bits_trains_and_is_evaluated"),
    "delayed_parameter_initialization": (
        "models have no values yet", MODEL, "models_are_made_as_the_configuration_says",
    ),
    "auto_partition": (
        "modules are where a script places them", PLACED, "blocks_of_a_language_model_are_where_they_are_placed",
    ),
    "default_partition": ("the others are there", PLACED, "the_default_partition_has_what_is_placed_nowhere"),
    **{
        key.name: (
            "refused, but for the default" if key.state == "fixed" else "none, which a warning says",
            COMPAT, "test_every_key_acts_or_says_that_it_does_not",
        )
        for key in keys.KEYS if key.state != "acts"
    },
}  # fmt: skip
"""By key: its effect, and the test of it, by its file below tests/torch and its name."""


def table() -> str:
    lines = ["| key | effect | test |", "|---|---|---|"]
    lines += ["| `{}` | {} | `{}::{}` |".format(key.name, *EFFECTS[key.name]) for key in keys.KEYS]
    return "\n".join(lines)


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("key", keys.KEYS, ids=lambda one: one.name)
def test_every_key_has_a_test_of_its_effect(key: keys.Key) -> None:
    effect, file, name = EFFECTS[key.name]
    path = ROOT / "tests" / "torch" / file
    assert effect
    assert name in functions_of(path), f"{path} has no {name}"
    if file.startswith("workers/"):
        launched = [other.read_text(encoding="utf-8") for other in (ROOT / "tests" / "torch").glob("*.py")]
        assert any(f'"{path.name}"' in text for text in launched), f"nothing launches {path.name}"


def test_no_other_keys_are_listed() -> None:
    assert EFFECTS.keys() == keys.BY_KEY.keys()


def test_the_order_of_actions() -> None:
    asked = {"pipeline_parallel_degree": 3, "microbatches": 7}
    orders = {
        name: read_config(asked | {"pipeline": name}).schedule(None) for name in ("interleaved", "simple", "1f1b")
    }
    assert len({order.digest for order in orders.values()}) == 3
    for active in (1, 2, 4):
        for name in ("interleaved", "simple"):
            given = read_config(asked | {"pipeline": name, "active_microbatches": active})
            assert max(sw.simulate(given.schedule(None)).peak_live_activations) == active


def test_replicas_and_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sw.ShardwrightError, match="ddp is False"):
        read_config({"pipeline_parallel_degree": 2}).mesh(4)
    mesh = read_config({"pipeline_parallel_degree": 2, "ddp": True}).mesh(4)
    assert dict(zip(mesh.names, mesh.sizes, strict=True))["dp"] == 2
    begun: list[str] = []
    begin = dist.init_process_group

    def note(backend: str, **given: object) -> None:
        begun.append(backend)
        begin("gloo", **given)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "init_process_group", note)
    for backend in ("gloo", "nccl"):
        sw.init({"ddp_dist_backend": backend}, device="cpu")
        sw.shutdown()
    assert begun == ["gloo", "nccl"]


def test_what_replicas_divide() -> None:
    """By levels: `test_sharded_state.py` trains under each, and counts what a rank holds."""
    for keys_of_run, level, group in (
        ({"shard_optimizer_state": True}, 1, None),
        ({"sharded_data_parallel_degree": 2}, 3, 2),
        ({}, 0, None),
    ):
        found = read_config({"ddp": True, **keys_of_run})
        assert (found.shard_level, found.sharing_replicas) == (level, group)


if __name__ == "__main__":
    print(table())
