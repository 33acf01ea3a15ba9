"""The values that the processes of a run compare before and in every step: versions, plan, state and batch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.capture.tree import Parts, path_names
from shardwright.backends.jax.loss.microbatches import LossFunction
from shardwright.backends.jax.machine.agreement import Agreement, array_sum, text_sum, versions
from shardwright.backends.jax.machine.mesh import stages_of_process
from shardwright.backends.jax.machine.rendezvous import current
from shardwright.backends.jax.state.train_state import TrainState
from shardwright.core.model.loss.scaling import LossScale
from shardwright.core.plan.plan import Plan

CALL = "call (a step, train.init, train.params), made in the same order"
"""The name of what is compared first: the method of the training step that was called."""


class StepAgreement(Agreement):
    """A comparison of the plan, the state and the batch of a step. With one process it does nothing at all."""

    def __init__(
        self, devices: Sequence[jax.Device], plan: Plan, loss: LossFunction, rule: LossScale | None, *, in_stages: bool
    ) -> None:
        super().__init__(devices, by_transfers=in_stages)
        self.plan, self.loss, self.rule = plan, loss, rule
        self._sums: dict[str, int] = {}
        """The sums of what is the same in every step; empty before the first."""
        self._given_sum = 0
        """The sum of the parameters that init was given as arrays."""
        self._calls = 0
        self._plan_sum = text_sum((plan.decision, plan.mesh))

    def explained(self) -> AbstractContextManager[Any]:
        """A context that names a peer that has failed in a step, in runs that began with `rendezvous.init`."""
        pulse = current()
        if self.alone or pulse is None:
            return nullcontext()
        self._calls += 1
        stages = stages_of_process(self.plan, self.devices)
        named = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        return pulse.explained(f"step {self._calls} of this process, {named}")

    def note_given(self, given: Parts) -> None:
        """Note the sum of the arrays that training begins with, so that it is compared too."""
        if not self.alone:
            self._given_sum = array_sum([np.asarray(leaf) for leaf in jax.tree.leaves(given.params)])

    def compare_call(self, name: str) -> None:
        """Wait until all processes have come to a call that makes transfers. Raises PlanError where others made another
        call, whose transfers would be paired with this one's."""
        if self.by_transfers:
            self.compare({CALL: text_sum(name), "plan": self._plan_sum}, wait=True)

    def compare_program(self, order: Any) -> None:
        """Wait until all processes have traced a step, and compare the order of its transfers. Raises PlanError where
        they differ."""
        if self.by_transfers:
            self.compare({CALL: text_sum("its compilation"), "order of transfers": text_sum(order)}, wait=True)

    def compare_step(self, state: TrainState, batch: FlatBatch, *, is_new: bool) -> None:
        """Compare what all processes must share. A step that ran before sums nothing but its batch anew. Raises
        PlanError, naming what differs."""
        if self.alone:
            return
        if is_new:
            held = [(name, leaf.shape, str(leaf.dtype)) for name, leaf in path_names((state.params, state.optimizer))]
            form = [(np.shape(leaf), str(leaf.dtype), dim) for leaf, dim in zip(batch.leaves, batch.dims, strict=True)]
            self._sums = {
                "versions of JAX and its libraries": text_sum(versions()),
                "plan": self._plan_sum,
                "parameters and optimizer": text_sum(held),
                "settings of train_step": text_sum((self.loss.has_aux, self.loss.reduction, str(self.rule))),
                "seed": array_sum(jax.tree.leaves(state.random)),
                "parameters given to init": self._given_sum,
                "form of the batch": text_sum((batch.structure, form)),
            }
        self.compare({CALL: text_sum("step"), **self._sums, "batch": array_sum(batch.leaves)}, wait=is_new)
