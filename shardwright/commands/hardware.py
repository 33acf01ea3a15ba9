"""`shardwright hardware`: the devices, links and nodes that are known, and a file for one's own."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.commands.output import JsonOption, print_json, print_view, require_folder
from shardwright.core.cluster.hardware.catalogue import (
    link_names,
    load_link,
    load_preset,
    load_profile,
    preset_names,
    profile_names,
)
from shardwright.core.cluster.hardware.template import template
from shardwright.core.errors import ClusterError
from shardwright.core.values.text_files import write_text


def hardware_command(
    new: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml", help="Write a file to fill in, every constant explained.", show_default=False
        ),
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="With --new: the device to begin from; default: h100.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the devices, links and kinds of node that are known by name; or write a file for a device of one's own."""
    if new is None:
        if like is not None:
            raise ClusterError(f"--like {like} without --new: add --new FILE.toml, which it is the beginning of")
        found = _known()
        if json:
            print_json(found)
        else:
            _show(found)
        return
    if new.suffix != ".toml":
        raise ClusterError(f"--new {new}: hardware files end in .toml")
    if new.exists():
        raise ClusterError(f"--new {new}: there is such a file already; give another name, or remove it")
    require_folder(new)
    write_text(new, template(like or "h100", str(new)), ClusterError)
    if json:
        print_json({"written": str(new)})
        return
    typer.echo(f"written to {new}: change what differs, then give it as --cluster {new}")


def _known() -> dict[str, Any]:
    devices = []
    for name in profile_names():
        profile = load_profile(name)
        device = profile.device
        devices.append(
            {
                "name": name, "summary": device.summary, "memory_bytes": device.memory_bytes,
                "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
                "peak_flops_per_s": dict(device.peak_flops_per_s), "intra_node": profile.intra_node.name,
                "inter_node": profile.inter_node.name, "price_usd_per_hour": device.price_usd_per_hour,
            }
        )  # fmt: skip
    links = [load_link(name) for name in link_names()]
    presets = {name: load_preset(name) for name in preset_names()}
    return {
        "devices": devices,
        "links": [
            {"name": link.name, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s,
             "sharing": link.sharing}
            for link in links
        ],
        "nodes": [
            {"name": name, "summary": node.summary, "device": node.device, "devices_per_node": node.devices_per_node,
             "intra_node": node.intra_node, "inter_node": node.inter_node}
            for name, node in presets.items()
        ],
    }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    from shardwright.report.tables import new_table

    devices = new_table(
        "Devices (--cluster NAME)", "name", "device", ">memory", ">bandwidth", ">peak", "in a node", "between nodes"
    )
    for device in found["devices"]:
        peaks = device["peak_flops_per_s"]
        kind = next((p for p in ("bf16", "fp16", "fp32") if p in peaks), next(iter(peaks)))
        devices.add_row(
            device["name"], device["summary"], f"{device['memory_bytes'] / 2**30:.0f} GiB",
            f"{device['memory_bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s", f"{peaks[kind] / 1e12:,.3g} TFLOP/s in {kind}",
            device["intra_node"], device["inter_node"],
        )  # fmt: skip
    links = new_table(
        "Links (--intra-node, --inter-node)", "name", ">one direction", ">latency", "the bandwidth is that of"
    )
    for link in found["links"]:
        whose = "each device" if link["sharing"] == "device" else "the node"
        speed = f"{link['bandwidth_bytes_per_s'] / 1e9:,.4g} GB/s"
        links.add_row(link["name"], speed, f"{link['latency_s'] * 1e6:.3g} µs", whose)
    nodes = new_table("Kinds of node (Cluster.preset)", "name", "node", "devices", "in a node", "between nodes")
    for node in found["nodes"]:
        devices_text = f"{node['devices_per_node']} × {node['device']}"
        nodes.add_row(node["name"], node["summary"], devices_text, node["intra_node"], node["inter_node"])
    print_view(devices, links, nodes, "of one's own: shardwright hardware --new mine.toml --like h100")
