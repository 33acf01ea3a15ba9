"""What a loss is to the batch: a mean over samples, a weighted mean, a sum, or something that couples samples."""

from shardwright.core.loss.combination import Combination as Combination
from shardwright.core.loss.combination import Count as Count
from shardwright.core.loss.combination import Guard as Guard
from shardwright.core.loss.combination import shares_of_microbatches as shares_of_microbatches
from shardwright.core.loss.program import LossOp as LossOp
from shardwright.core.loss.program import LossProgram as LossProgram
from shardwright.core.loss.program import Source as Source
from shardwright.core.loss.read import read_loss as read_loss
from shardwright.core.loss.values import follows as follows
from shardwright.core.loss.verdict import Finding as Finding
from shardwright.core.loss.verdict import Verdict as Verdict
