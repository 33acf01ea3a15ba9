"""Activations that stay on a device between a shard's forward and backward, where the only device has room for them."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.jobs.cut import Cut
from shardwright.core.jobs.shard_pass import kept_within
from shardwright.core.jobs.shard_tables import ShardTables


def keeping(tables: Sequence[ShardTables], cuts: Sequence[Cut], room_bytes: int, *, beside: bool) -> list[Cut]:
    """The cuts with the activations of some shards kept on the device, those first that save most time for their bytes.

    With several devices none are: a backward may run on another device than its forward. All jobs may be between a
    forward and a backward at once, so that the room is for the kept activations of all of them.
    """
    gains: list[tuple[float, int, int, int]] = []
    for number, (own, cut) in enumerate(zip(tables, cuts, strict=True)):
        for shard, (a, b) in enumerate(cut.ends(own.units)[:-1]):
            now, kept = own.passes(a, b, cut.labels[shard]), own.passes(a, b, "keep")
            saved = sum(each.seconds(beside=beside) for each in now) - sum(each.seconds(beside=beside) for each in kept)
            size = own.activations_bytes(a, b)
            apart = max(each.device_bytes - kept_within(each.kind, size, own.microbatches) for each in kept)
            more = apart - max(each.device_bytes for each in now)
            needs = size * own.microbatches + max(0, more)
            if saved > 0 and needs <= room_bytes:
                gains.append((-saved / max(1, needs), number, shard, needs))
    labels = [list(cut.labels) for cut in cuts]
    for _, number, shard, needs in sorted(gains):
        if needs <= room_bytes:
            room_bytes -= needs
            labels[number][shard] = "keep"
    return [replace(cut, labels=tuple(of)) for cut, of in zip(cuts, labels, strict=True)]
