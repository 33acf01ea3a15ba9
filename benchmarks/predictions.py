"""How long 1,000 predictions of a 96-layer model take: the aim is 60 s.

    python benchmarks/predictions.py [--count 1000]

Each is a whole plan with its degrees and schedule pinned: cut, memory and the simulated pipeline of GPT-3 175B on
1,024 A100, for
different degrees, microbatches, batches and recompute.
"""

import argparse
import itertools
import sys
import time

from predict import graph_of

import shardwright as sw

AIM_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    count = parser.parse_args().count
    graph = graph_of(12288, 96, 96, 2048)
    cluster = sw.Cluster.preset("dgx-a100", nodes=128)
    degrees = [(pp, tp) for pp, tp in itertools.product((4, 8, 16), (4, 8)) if pp * tp >= 32]
    batches = range(512, 512 * 101, 512)
    started, worked, done = time.perf_counter(), time.process_time(), 0
    for batch, (pp, tp), microbatch in itertools.product(batches, degrees, (1, 2, 4)):
        dp = cluster.world_size // (pp * tp)
        if done == count or batch % (dp * microbatch):
            continue
        sw.plan(
            graph, cluster, batch=batch, pp=pp, tp=tp, dp=dp, microbatch=microbatch, recompute="full", shard=1,
            schedule="1f1b", virtual_stages=1,
        )  # fmt: skip
        done += 1
    taken_s, cpu_s = time.perf_counter() - started, time.process_time() - worked
    print(
        f"{done} predictions of {graph.parameter_count():,} parameters: {taken_s:.1f} s, {cpu_s:.1f} s of them on the "
        f"processor, {cpu_s / done * 1e3:.1f} ms each (aim {AIM_S:.0f} s for 1000)"
    )
    return 0 if taken_s <= AIM_S * done / 1000 else 1


if __name__ == "__main__":
    sys.exit(main())
