"""Devices and links: the values, and a catalogue of data files that give the origin of each constant."""

from shardwright.core.cluster.hardware.catalogue import (
    link_names,
    load_device,
    load_link,
    load_preset,
    load_profile,
    preset_names,
    profile_names,
)
from shardwright.core.cluster.hardware.device import PRECISIONS, Device, Profile
from shardwright.core.cluster.hardware.frozen_mapping import Table
from shardwright.core.cluster.hardware.link import Link

__all__ = [
    "PRECISIONS",
    "Device",
    "Link",
    "Profile",
    "Table",
    "link_names",
    "load_device",
    "load_link",
    "load_preset",
    "load_profile",
    "preset_names",
    "profile_names",
]
