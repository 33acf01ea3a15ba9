"""A hardware file to start from: the constants of a known device, each under a line that says what it is."""

from collections.abc import Mapping

from shardwright.core.cluster.hardware.catalogue import load_profile
from shardwright.core.cluster.hardware.profile_fields import FORMAT, DeviceTable, device_document, link_document
from shardwright.core.cluster.toml_file import toml_value

MEANINGS = {
    "name": "The name of the device, as plans show it.",
    "kind": "What it is: gpu, tpu, trainium or cpu.",
    "summary": "A line for people.",
    "memory_bytes": "Bytes of its whole memory.",
    "reserved_memory_bytes": "Bytes of it that driver, runtime and communication library take before a model has any.",
    "memory_bandwidth_bytes_per_s": "Bytes per second of its own memory, by data sheet.",
    "kernel_launch_s": "Seconds that one op costs at least, however small.",
    "matmul_efficiency": "The share of the peak that large matrix products reach, up to 1.",
    "memory_efficiency": "The share of the memory bandwidth that large copies reach, up to 1.",
    "host_link_bandwidth_bytes_per_s": "Bytes per second that copies to and from the host's memory reach, each.",
    "compute_units": "Multiprocessors that share out the tiles of a matrix product. Without it: no such rounding.",
    "tile_depth": "Contracted entries that a tile's start and end cost beside its own. Without it: none.",
    "vector_efficiency": "The share of that which everything but products reaches. Without it: memory_efficiency.",
    "dispatch_s": "Seconds of the host to issue a product, or a chain of fused ops. Without it: kernel_launch_s.",
    "attention_efficiency": "The rate of attention in one kernel, as a share of large products. Without it: a prior.",
    "optimizer_efficiency": "The share of that which an optimizer's step reaches. Without it: memory_efficiency.",
    "host_memory_bytes": "What it has for itself of the host's memory. Without it: no limit.",
    "price_usd_per_hour": "US dollars per hour of one device. Without it: not known.",
    "peak_flops_per_s": "Multiplications and additions per second of dense products, in each precision that it has.",
    "sharing": 'Whose the bandwidth is: each "device" has such a port, or the "node" has one that all share.',
    "transport": "The kind of wire, whose protocols are known: nvlink, pci, infiniband, efa or tcp. Without it: none.",
    "bandwidth_bytes_per_s": "Bytes per second in one direction, by data sheet (100 Gb/s are 12.5e9).",
    "latency_s": "Seconds from the start of a message until its first byte arrives.",
    "efficiency": "The share of the bandwidth that large messages reach, up to 1.",
    "collectives": "Measured collectives, which stand in for the constants: `shardwright profile` writes them.",
}  # fmt: skip
"""What every constant of a hardware file is."""
_HEAD = """\
# A device of one's own, and the links of its usual node: every constant with its origin. Change what differs, and its
# origin with it: "KIND: which one", of kind data sheet, measured, fitted, derived, prior, price list or user; or write
# a plain number, as in memory_bytes = 80e9. Units are bytes, seconds, FLOPs and shares of 1: 80 GB are 80e9, 400 Gb/s
# are 50e9, 989 TFLOP/s are 989e12, 5 µs are 5e-6, 70% are 0.7.
# Then: shardwright plan FILE.py:FUNCTION --cluster {place} --nodes 2 --devices-per-node 8 --batch 64
# `shardwright profile {place}` writes such a file from measurements on this machine.
"""


def template(like: str, place: str) -> str:
    """The text of a hardware file with the constants of a known device and of its links.

    Args:
        like: the name of the device.
        place: where the file is to be, as its comments say.

    Raises ClusterError for an unknown name, with the nearest.
    """
    profile = load_profile(like)
    known = device_document(profile.device)
    peaks = known.pop("peak_flops_per_s")
    known |= {"name": f"my-{like}", "summary": f"like {like}"}
    lines = [_HEAD.format(place=place), f"format = {FORMAT}"]
    lines += _entries(known, like)
    lacking = (
        name for name, field in DeviceTable.model_fields.items() if not field.is_required() and name not in known
    )
    for name in lacking:
        lines += ["", f"# {MEANINGS[name]}", f"# {name} ="]
    lines += ["", f"# {MEANINGS['peak_flops_per_s']}", "[peak_flops_per_s]"]
    lines += [f"{precision} = {toml_value(_taken(peak, like))}" for precision, peak in peaks.items()]
    for where, link in (("intra_node", profile.intra_node), ("inter_node", profile.inter_node)):
        lines += ["", f"# {_LINKS[where]} A name (`shardwright hardware`) may stand in its place.", f"[links.{where}]"]
        known = {name: value for name, value in link_document(link).items() if name != "collectives"}
        lines += _entries(known | {"name": f"my-{link.name}"}, link.name, MEANINGS | {"name": _LINK_NAME})
    return "\n".join(lines) + "\n"


_LINK_NAME = "The name of the link, as tables show it."
_LINKS = {
    "intra_node": "The link between the devices of one node.",
    "inter_node": "The link between nodes.",
}


def _entries(document: dict[str, object], like: str, meanings: Mapping[str, str] = MEANINGS) -> list[str]:
    lines = []
    for name, value in document.items():
        lines += ["", f"# {meanings[name]}", f"{name} = {toml_value(_taken(value, like))}"]
    return lines


def _taken(value: object, like: str) -> object:
    """A constant with the origin that it has in the file of another device."""
    return value | {"origin": f"derived: taken from {like}"} if isinstance(value, dict) else value
