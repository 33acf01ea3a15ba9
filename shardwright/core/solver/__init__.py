"""The layout solver: placements of all parameters and activations at least time under a memory limit."""

from shardwright.core.solver.chain import Alternative as Alternative
from shardwright.core.solver.chain import Pins as Pins
from shardwright.core.solver.chain import Solution as Solution
from shardwright.core.solver.chain import UnitSolution as UnitSolution
from shardwright.core.solver.chain import alternatives as alternatives
from shardwright.core.solver.chain import lightest_bytes as lightest_bytes
from shardwright.core.solver.chain import solve as solve
from shardwright.core.solver.chain import solve_at as solve_at
from shardwright.core.solver.op_prices import AxisCost as AxisCost
from shardwright.core.solver.op_prices import Setting as Setting
from shardwright.core.solver.shared_problem import Frame as Frame
