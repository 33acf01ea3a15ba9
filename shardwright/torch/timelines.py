"""Measured timelines of training steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.backends.torch.pipeline.action_times import gather
from shardwright.core.errors import ShardwrightError
from shardwright.core.schedule.timeline import Timeline
from shardwright.torch import session as sessions
from shardwright.torch.model import DistributedModel


@contextmanager
def record_timeline(model: DistributedModel | None = None) -> Iterator[list[Timeline]]:
    """Record when each action of the steps inside runs; every rank enters and leaves this together.

    Args:
        model: the model whose steps are recorded; default: the only one.

    Gives a list that holds, once the block is left, one `Timeline` for each step: that of this replica's pipeline, the
    same on all its ranks, on one clock. An action starts when its inputs are there, so that waiting is idle time.

    Raises:
        ShardwrightError: there is no model yet, there are several and none is given, or timelines are recorded already.
    """
    session = sessions.current()
    fix = "say which, sw.record_timeline(model)"
    run = session.only("sw.record_timeline is for the steps of one model", fix) if model is None else session.of(model)
    split_model = run.runtime.split_model
    if split_model.recorders is not None:
        raise ShardwrightError("timelines are being recorded already: leave the other record_timeline() first")
    split_model.recorders = []
    found: list[Timeline] = []
    try:
        yield found
        session.agreement.meet(run.of_model("the end of sw.record_timeline"), notes=(len(split_model.recorders),))
        found += gather(split_model.recorders, session.bound.size("pp"), session.bound, session.watchdog)
    finally:
        split_model.recorders = None
