"""The relation of a loss to its batch: a mean over samples, a weighted mean, a sum, or one that couples samples."""

from shardwright.core.model.loss.combination import Combination as Combination
from shardwright.core.model.loss.combination import Count as Count
from shardwright.core.model.loss.combination import Guard as Guard
from shardwright.core.model.loss.combination import shares_of_microbatches as shares_of_microbatches
from shardwright.core.model.loss.program import LossOp as LossOp
from shardwright.core.model.loss.program import LossProgram as LossProgram
from shardwright.core.model.loss.program import Source as Source
from shardwright.core.model.loss.read import read_loss as read_loss
from shardwright.core.model.loss.read import read_results as read_results
from shardwright.core.model.loss.result import ResultOfBatch as ResultOfBatch
from shardwright.core.model.loss.result import place_by_shape as place_by_shape
from shardwright.core.model.loss.values import Place as Place
from shardwright.core.model.loss.values import follows as follows
from shardwright.core.model.loss.verdict import Finding as Finding
from shardwright.core.model.loss.verdict import Verdict as Verdict
