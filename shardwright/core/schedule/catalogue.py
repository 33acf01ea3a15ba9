"""Every schedule that has a name. A new family is one file and one line here."""

from shardwright.core.schedule.family import Family
from shardwright.core.schedule.gpipe import GPIPE
from shardwright.core.schedule.one_f_one_b import ONE_F_ONE_B

FAMILIES: dict[str, Family] = {family.name: family for family in (GPIPE, ONE_F_ONE_B)}
