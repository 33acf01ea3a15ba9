"""Measured timelines of training steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.backends.torch.pipeline.action_times import gather
from shardwright.core.errors import ShardwrightError
from shardwright.core.schedule.timeline import Timeline
from shardwright.torch import session as sessions


@contextmanager
def record_timeline() -> Iterator[list[Timeline]]:
    """Record when each action of the steps inside runs; every rank enters and leaves this together.

    Gives a list that holds, once the block is left, one `Timeline` for each step: that of this replica's pipeline, the
    same on all its ranks, on one clock. An action starts when its inputs are there, so that waiting is idle time.

    Raises:
        ShardwrightError: there is no model yet, or timelines are recorded already.
    """
    session = sessions.current()
    runtime = session.runtime
    if runtime is None:
        raise ShardwrightError("wrap the model first: sw.DistributedModel(model)")
    model = runtime.split_model
    if model.recorders is not None:
        raise ShardwrightError("timelines are being recorded already: leave the other record_timeline() first")
    model.recorders = []
    found: list[Timeline] = []
    try:
        yield found
        session.agreement.meet("the end of sw.record_timeline", notes=(len(model.recorders),))
        found += gather(model.recorders, session.bound.size("pp"), session.bound, session.watchdog)
    finally:
        model.recorders = None
