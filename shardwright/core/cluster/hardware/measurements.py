"""The measurements that a machine takes of itself, and the profile that follows from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.core.cluster.hardware import check
from shardwright.core.cluster.hardware.catalogue import profile_of
from shardwright.core.cluster.hardware.collective_table import MeasuredCollective
from shardwright.core.cluster.hardware.device import Kind, MeasuredProduct, MeasuredUnit, Profile
from shardwright.core.cluster.toml_file import write
from shardwright.core.errors import ClusterError

SHARED_MEMORY_LINK = "shared-memory"
MeasureProgress = Callable[[str, int, int], None]
"""A function called with (what is being measured, how much is done, how much there is)."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of one device, as its framework uses it, and of its group's collectives (none for one rank).

    memory_bandwidth_bytes_per_s: that of a copy, bytes read and written together.
    vector_efficiency: the share of it that a chain of elementwise ops and a normalisation reaches, its traffic counted
        as if the chain were one kernel.
    optimizer_efficiency: the share of it that a step of AdamW reaches, counted as one kernel.
    kernel_launch_s: the time of one op in a chain of small elementwise ops.
    dispatch_s: the host's time to issue a product of a model in training; None: it was not measured apart.
    attention_efficiency: the rate of attention in one kernel as a share of the fastest product's in its precision;
        None: it was not measured.
    units: the measured units of a model, if one was measured too.

    Raises ClusterError when a figure is not positive and finite, or no product was measured.
    """

    name: str
    kind: Kind
    measured_on: str
    memory_bytes: int
    products: tuple[MeasuredProduct, ...]
    memory_bandwidth_bytes_per_s: float
    vector_efficiency: float
    optimizer_efficiency: float
    kernel_launch_s: float
    host_link_bandwidth_bytes_per_s: float
    dispatch_s: float | None = None
    attention_efficiency: float | None = None
    rank: int = 0
    """The rank that measured, of ``ranks``; rank 0 writes the profile."""
    ranks: int = 1
    collectives: tuple[MeasuredCollective, ...] = ()
    """Those of all ``ranks``, and of groups of fewer that all ran at once."""
    units: tuple[MeasuredUnit, ...] = ()

    def __post_init__(self) -> None:
        owner = f"measurements of {self.name!r}"
        if not self.products:
            raise ClusterError(f"{owner}: no matrix product was measured")
        check.whole(owner, "memory_bytes", self.memory_bytes, at_least=1)
        shares = "vector_efficiency", "optimizer_efficiency"
        for name in ("memory_bandwidth_bytes_per_s", *shares, "kernel_launch_s", "host_link_bandwidth_bytes_per_s"):
            check.positive(owner, name, getattr(self, name))
        for name in ("dispatch_s", "attention_efficiency"):
            if (value := getattr(self, name)) is not None:
                check.positive(owner, name, value)
        if self.ranks > 1 and len(self._all_reduces) < 2:
            raise ClusterError(
                f"{owner}: {self.ranks} ranks and {len(self._all_reduces)} all-reduces of them all, expected 2 or more"
            )

    @property
    def _all_reduces(self) -> tuple[MeasuredCollective, ...]:
        """The all-reduces of all ranks."""
        return tuple(each for each in self.collectives if each.kind == "all_reduce" and each.ranks == self.ranks)

    def document(self) -> dict[str, Any]:
        """The profile as plain values, as a profile file holds them; every constant says that it was measured."""

        def constant(value: float, what: str) -> dict[str, Any]:
            return {"value": value, "origin": f"measured: {what} on {self.measured_on}"}

        peaks: dict[str, float] = {}
        for product in self.products:
            peaks[product.precision] = max(product.flops_per_s, peaks.get(product.precision, 0.0))
        document: dict[str, Any] = {
            "format": 1,
            "name": self.name,
            "kind": self.kind,
            "summary": f"measured on {self.measured_on}",
            "memory_bytes": constant(float(self.memory_bytes), "what the system reports"),
            "reserved_memory_bytes": constant(0.0, "counted as used by the model's own process"),
            "memory_bandwidth_bytes_per_s": constant(self.memory_bandwidth_bytes_per_s, "reads and writes of one op"),
            "kernel_launch_s": constant(self.kernel_launch_s, "small elementwise ops"),
            "matmul_efficiency": constant(1.0, "the peaks are those reached"),
            "memory_efficiency": constant(1.0, "the bandwidth is that reached"),
            "host_link_bandwidth_bytes_per_s": constant(self.host_link_bandwidth_bytes_per_s, "a copy to the host"),
            "vector_efficiency": constant(min(1.0, self.vector_efficiency), "normalisation, GELU and sum"),
            "optimizer_efficiency": constant(min(1.0, self.optimizer_efficiency), "a step of AdamW"),
            "peak_flops_per_s": {
                precision: constant(peak, "the fastest product") for precision, peak in sorted(peaks.items())
            },
        }
        if self.dispatch_s is not None:
            document["dispatch_s"] = constant(self.dispatch_s, "a forward of transformer blocks, of its host,")
        if self.attention_efficiency is not None:
            document["attention_efficiency"] = constant(min(1.0, self.attention_efficiency), "attention, both passes,")
        link: Any = SHARED_MEMORY_LINK
        if self.ranks > 1:
            latency_s, reached = ring_constants(self._all_reduces)
            fastest = max(reached, *(each.port_bytes_per_s for each in self.collectives))
            link = {
                "name": f"{self.name}-link",
                "sharing": "device",
                "bandwidth_bytes_per_s": constant(fastest, "the fastest collective, bytes that left each rank,"),
                "latency_s": constant(latency_s, f"all-reduces of {self.ranks} ranks"),
                "efficiency": constant(reached / fastest, f"all-reduces of {self.ranks} ranks"),
                "collectives": [asdict(each) for each in self.collectives],
            }
        document["links"] = {"intra_node": link, "inter_node": "ethernet-100g" if self.ranks == 1 else link}
        document["products"] = [asdict(product) for product in self.products]
        if self.units:
            document["units"] = [asdict(unit) for unit in self.units]
        return document

    def profile(self) -> Profile:
        """The profile that a cluster of such devices takes."""
        return profile_of(self.document(), f"measurements of {self.name!r}")

    def save(self, path: Path) -> None:
        """Write the profile file, which ``Cluster`` and ``load_profile`` accept by its path."""
        write(path, self.document())


def ring_constants(samples: Sequence[MeasuredCollective]) -> tuple[float, float]:
    """(latency in seconds, bandwidth in bytes per second) of the ring whose all-reduces were measured, all of as many
    ranks: what stands in for collectives of other numbers of ranks.

    An all-reduce takes 2(p−1)·α + 2(p−1)/p·n/β. The line goes through the smallest and the larger samples by least
    squares of relative errors, so that small messages count as much as large ones.
    Raises ClusterError when the times do not grow with the bytes.
    """
    sizes = np.array([s.size_bytes for s in samples], dtype=np.float64)
    seconds = np.array([s.seconds for s in samples])
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (start, slope), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if slope <= 0:
        raise ClusterError("the measured all-reduces do not take longer for more bytes: measure again, undisturbed")
    ranks = samples[0].ranks
    steps = 2 * (ranks - 1)
    return max(float(start), 0.0) / steps, steps / ranks / float(slope)


def operands_in_turn(size_bytes: int) -> int:
    """The number of right operands that a measured product takes in turn. One of a MiB or more stands for a weight, and
    a step reads those of all layers one after another, so that none is in a cache when its turn comes: they are of 128
    MiB together."""
    return max(1, (1 << 27) // size_bytes) if size_bytes >= 1 << 20 else 1


def rate_of(products: Mapping[tuple[int, int, int], float], m: int, n: int, k: int) -> float:
    """FLOPs per second of a product between those that were measured: the mean of all, weighted by nearness.

    Nearness is the inverse fourth power of the distance in the logarithms of m, n and k, so that a measured shape has
    its own rate.
    """
    wanted = np.log([m, n, k])
    shapes = np.log(np.array(list(products), dtype=np.float64))
    rates = np.array(list(products.values()))
    squared = ((shapes - wanted) ** 2).sum(axis=1)
    if squared.min() < 1e-12:
        return float(rates[squared.argmin()])
    weights = squared**-2.0
    return float(np.exp((weights * np.log(rates)).sum() / weights.sum()))
