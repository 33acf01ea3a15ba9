"""Every schedule that has a name. A new family is one file and one line here."""

from shardwright.core.schedule.families.dualpipe_v import DUALPIPE_V
from shardwright.core.schedule.families.eager_one_f_one_b import EAGER_ONE_F_ONE_B
from shardwright.core.schedule.families.forward_only import FORWARD_ONLY
from shardwright.core.schedule.families.gpipe import GPIPE
from shardwright.core.schedule.families.interleaved_one_f_one_b import INTERLEAVED_ONE_F_ONE_B
from shardwright.core.schedule.families.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from shardwright.core.schedule.families.looped_bfs import LOOPED_BFS
from shardwright.core.schedule.families.one_f_one_b import ONE_F_ONE_B
from shardwright.core.schedule.families.sagemaker import INTERLEAVED, SIMPLE
from shardwright.core.schedule.families.v_half import V_HALF
from shardwright.core.schedule.families.v_min import V_MIN
from shardwright.core.schedule.families.zero_bubble_h1 import ZERO_BUBBLE_H1
from shardwright.core.schedule.families.zero_bubble_h2 import ZERO_BUBBLE_H2
from shardwright.core.schedule.families.zero_bubble_v import ZERO_BUBBLE_V
from shardwright.core.schedule.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        FORWARD_ONLY,
        GPIPE,
        ONE_F_ONE_B,
        EAGER_ONE_F_ONE_B,
        INTERLEAVED_ONE_F_ONE_B,
        LOOPED_BFS,
        ZERO_BUBBLE_H1,
        ZERO_BUBBLE_H2,
        INTERLEAVED_ZERO_BUBBLE,
        ZERO_BUBBLE_V,
        V_HALF,
        V_MIN,
        DUALPIPE_V,
        SIMPLE,
        INTERLEAVED,
    )
}
