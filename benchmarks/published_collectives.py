"""Published times of collectives (nccl-tests, out of place), which `collectives.py` compares with predictions.

Some constants of `hardware/links.toml` and `protocols.toml` were fitted on the tables whose line says so.
"""

from dataclasses import dataclass
from typing import Literal

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Table:
    """One table: microseconds by bytes.

    launch_us: microseconds that one process takes to launch on all GPUs of a node, one after the other, which is no
        part of a collective where every GPU has a process.
    """

    source: str
    device: str
    nodes: int
    per_node: int
    collective: Literal["all_reduce", "all_gather", "reduce_scatter"]
    microseconds: dict[int, float]
    intra_node: str | None = None
    inter_node: str | None = None
    launch_us: float = 0.0
    fitted: bool = False


SUPERBENCH = "microsoft/superbenchmark, test_cuda_nccl_bw_performance.py: one process, A100-SXM4-40GB"
TABLES = (
    Table(
        SUPERBENCH, "a100-40gb", 1, 8, "all_reduce",
        {8: 34.7, 64 * KIB: 37.8, 256 * KIB: 47.5, MIB: 74.8, 4 * MIB: 112, 16 * MIB: 226, 64 * MIB: 584.5,
         256 * MIB: 2112, GIB: 8159}, launch_us=20,
    ),
    Table(
        SUPERBENCH, "a100-40gb", 1, 8, "all_gather",
        {64 * KIB: 36.3, 256 * KIB: 46.5, MIB: 73, 4 * MIB: 100.7, 16 * MIB: 167.7, 64 * MIB: 379.7, 256 * MIB: 1192,
         GIB: 4413}, launch_us=20,
    ),
    Table(
        SUPERBENCH, "a100-40gb", 1, 8, "reduce_scatter",
        {64 * KIB: 36.8, 256 * KIB: 48.1, MIB: 72.4, 4 * MIB: 108.9, 16 * MIB: 152.4, 64 * MIB: 356, 256 * MIB: 1109,
         GIB: 4203}, launch_us=20,
    ),
    Table(
        "AzureML guide to HPC applications: two Standard_ND96asr_v4, HDR", "a100-40gb", 2, 8, "all_reduce",
        {8: 37.8, 64 * KIB: 73.3, 256 * KIB: 69, MIB: 96.6, 4 * MIB: 147, 16 * MIB: 332, 64 * MIB: 948, 256 * MIB: 2975,
         GIB: 11080}, inter_node="ib-hdr200",
    ),
    Table(
        "NVIDIA/deepops, docs/slurm-cluster: four DGX A100, HDR", "a100-40gb", 4, 8, "all_reduce",
        {MIB: 135, 4 * MIB: 229, 16 * MIB: 381, 64 * MIB: 1080, 256 * MIB: 3083, GIB: 11643}, inter_node="ib-hdr200",
    ),
    Table(
        "AWS EFA workshop, NCCL tests: two p4de", "a100-80gb", 2, 8, "all_reduce",
        {8: 174, 64 * KIB: 224, 256 * KIB: 234, MIB: 307, 4 * MIB: 523, 16 * MIB: 1200, 64 * MIB: 2725, 256 * MIB: 7390,
         GIB: 25940}, inter_node="efa-400g", fitted=True,
    ),
    Table(
        "Sheffield HPC documentation, Bessemer: four V100 on PCI Express", "v100", 1, 4, "all_reduce",
        {8: 13.4, 64 * KIB: 30, 256 * KIB: 64.6, MIB: 156.5, 4 * MIB: 657, 16 * MIB: 2671, 64 * MIB: 10712},
        intra_node="pcie3",
    ),
)  # fmt: skip
