"""Predictions of published runs, through the same call that users make: a plan with everything pinned."""

from functools import lru_cache

from megatron import gpt
from published import Run

import shardwright as sw


@lru_cache(maxsize=16)
def graph_of(hidden: int, heads: int, layers: int, sequence: int, vocabulary: int = 51200) -> sw.Graph:
    """The graph of a published GPT."""
    return gpt(layers, hidden, heads, sequence, vocabulary)


def even_starts(layers: int, stages: int) -> tuple[int, ...]:
    """Megatron's cut: as many layers on every stage, the embedding before the first, norm and head after the last."""
    per_stage = layers / stages
    return (0, *(1 + round(stage * per_stage) for stage in range(1, stages)))


def plan_of(run: Run, cluster: sw.Cluster, recompute: str = "full", **options: object) -> sw.Plan:
    """The plan that a published run followed. Mixed precision in fp16 with gradients as given in ``options``."""
    stages = run.pp * run.virtual_stages
    return sw.plan(
        graph_of(run.hidden, run.heads, run.layers, run.sequence),
        cluster,
        batch=run.batch,
        pp=run.pp,
        dp=run.dp,
        tp=run.tp,
        microbatch=run.microbatch,
        virtual_stages=run.virtual_stages,
        schedule="interleaved-1f1b" if run.virtual_stages > 1 else "1f1b",
        recompute=recompute,  # type: ignore[arg-type]
        shard=0,
        precision="fp16",
        stage_starts=even_starts(run.layers, stages),
        **options,  # type: ignore[arg-type]
    )
