"""Conversions between layouts: which collectives, in which order, moving how many bytes."""

from shardwright.core.conversions.path import Conversion as Conversion
from shardwright.core.conversions.path import convert as convert
from shardwright.core.conversions.step import Step as Step
from shardwright.core.conversions.table import table_bytes as table_bytes
from shardwright.core.conversions.transfer import Transfer as Transfer
from shardwright.core.conversions.transfer import transfer as transfer
