"""Conversions between layouts: which collectives, in which order, moving how many bytes."""

from shardwright.core.layout.conversions.path import Conversion as Conversion
from shardwright.core.layout.conversions.path import convert as convert
from shardwright.core.layout.conversions.step import Step as Step
from shardwright.core.layout.conversions.table import table_bytes as table_bytes
from shardwright.core.layout.conversions.transfer import Transfer as Transfer
from shardwright.core.layout.conversions.transfer import transfer as transfer
