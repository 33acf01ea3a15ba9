"""One run of jobs in the event engine: a policy that decides whose unit is next whenever a device is free.

A unit holds its device and its job, a copy holds one direction of a host link. The engine asks in the order of time:
about a job when it may run its next unit, about a device when its unit has ended, about a device's buffer when the
shard of the next unit may be copied into it. Of what is due at one time jobs come first, so that a device chooses among
all that are there.

With double buffering a device has room for two shards: while a unit runs in one half, the shard of the last one is
copied out of the other and then that of the next one into it. The next unit is chosen when its copy may start; the job
that is running may be chosen to go on, and then its next unit follows on the same device without waiting for the copy
out. Without double buffering a device copies in, runs and copies out one after the other.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from shardwright.core.events import NOTHING, Engine, Log, Memory, Resource
from shardwright.core.jobs.policies import JobQueue
from shardwright.core.jobs.unit_tables import UnitTables
from shardwright.core.jobs.units import CopyLog


@dataclass(slots=True)
class _Next:
    """The unit that is next on a device, its shard on the way or there."""

    job: int
    ready_s: float
    cause: int
    is_own: bool
    """Whether it follows the unit that the device was running when it was chosen, of the same job."""


@dataclass(slots=True)
class _Device:
    """A device: what it runs, what is next, and its memory."""

    memory: Memory
    held: Resource = field(default_factory=Resource)
    running: int = NOTHING
    """The job whose unit runs, until its end is seen to."""
    unit: int = 0
    """The unit of that job."""
    next: _Next | None = None
    buffer: Resource = field(default_factory=Resource)
    """The half of the memory that the running unit, or the last one, does not use."""
    left: Resource = field(default_factory=Resource)
    """The half that the last unit used: free when its shard is copied out."""
    outgoing: deque[tuple[float, int, int]] = field(default_factory=deque)
    """The shards that are copied out, the first to be gone first: until when, by which copy, and their bytes."""
    gone: Resource = field(default_factory=Resource)
    """The last of them that is gone."""
    is_idle: bool = False


class JobsRun:
    """One run of jobs on devices. Resources are numbered jobs first, then the shards that leave devices, devices, and
    their buffers: the order in which those that are due at one time are asked about."""

    def __init__(
        self,
        tables: UnitTables,
        devices: int,
        queue: JobQueue,
        *,
        double_buffering: bool = True,
        host_links: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self.tables, self.queue, self.engine = tables, queue, Engine()
        self.is_double = double_buffering
        self.looks_ahead = double_buffering and tables.copy_in_s is not None
        self.first_leaving = tables.jobs
        self.first_device = self.first_leaving + devices
        self.first_buffer = self.first_device + devices
        self.devices = [_Device(Memory(device_bytes)) for _ in range(devices)]
        self.links_in = [Resource() for _ in range(host_links or devices)]
        self.links_out = [Resource() for _ in self.links_in]
        self.idle: list[int] = []
        self.unfilled: list[int] = []
        """Devices at work for whose buffer nothing was there to be chosen."""
        self.jobs = [Resource(at) for at in tables.arrival_s]
        self.position = [0] * tables.jobs
        self.left_s = [float(sum(units)) for units in tables.seconds]
        self.stays = bytearray(tables.jobs)
        """Whether a job's next unit follows on the device that runs it."""
        self.log, self.copies = Log(), CopyLog()
        self.ran_job, self.ran_unit = array("i"), array("i")

    def run(self) -> None:
        """Run every job to its end."""
        for job, at in enumerate(self.tables.arrival_s):
            if self.tables.runs[job]:
                self.engine.ask_at(at, job)
        for at in range(len(self.devices)):
            self._rest(at)
        self.engine.run(self)

    def advance(self, resource: int) -> None:
        """A job may run its next unit, a shard is gone, a device's unit has ended or is there, or a buffer is free."""
        if resource < self.first_leaving:
            if not self.stays[resource]:
                self.queue.put(resource, self.left_s[resource])
                self._call_one()
        elif resource < self.first_device:
            self._leave(resource - self.first_leaving)
        elif resource < self.first_buffer:
            self._advance_device(resource - self.first_device)
        else:
            self._fill_buffer(resource - self.first_buffer)

    def _ask_device(self, time_s: float, at: int) -> None:
        self.engine.ask_at(time_s, self.first_device + at)

    def _rest(self, at: int) -> None:
        if not self.devices[at].is_idle:
            self.devices[at].is_idle = True
            heappush(self.idle, at)

    def _call_one(self) -> None:
        """Ask about one device that has nothing to do, or about one buffer."""
        if self.idle:
            at = heappop(self.idle)
            self.devices[at].is_idle = False
            self._ask_device(self.engine.now_s, at)
            return
        while self.unfilled:
            at = heappop(self.unfilled)
            if self.devices[at].running != NOTHING and self.devices[at].next is None:
                self.engine.ask_at(self.engine.now_s, self.first_buffer + at)
                return

    def _advance_device(self, at: int) -> None:
        device, now = self.devices[at], self.engine.now_s
        if now < device.held.free_s:
            return
        if device.running != NOTHING and not self._end(at, device):
            return
        if device.next is None:
            if device.buffer.free_s > now:
                self._ask_device(device.buffer.free_s, at)
                return
            job = self.queue.take()
            if job is None:
                self._rest(at)
                return
            if not self._has_room(device, job):
                self._put_back(job)
                return
            device.next = self._copy_in(at, device, job, device.held.free_s, device.held.last)
        if device.next.ready_s > now:
            self._ask_device(device.next.ready_s, at)
        else:
            self._start(at, device, device.next)

    def _fill_buffer(self, at: int) -> None:
        """Choose what a device at work runs next, and copy it in."""
        device = self.devices[at]
        job = device.running
        if job == NOTHING or device.next is not None or device.buffer.free_s > self.engine.now_s:
            return
        goes_on = self.position[job] < len(self.tables.seconds[job])
        chosen = self.queue.take((job, self.left_s[job]) if goes_on else None)
        if chosen is None:
            heappush(self.unfilled, at)
        elif self._has_room(device, chosen):
            number = device.held.last
            device.next = self._copy_in(at, device, chosen, self.log.start_s[number], self.log.cause[number])
        elif chosen != job:
            self._put_back(chosen)

    def _put_back(self, job: int) -> None:
        """A device has no room for a job: it asks again when a shard leaves it, and another one may have room now."""
        self.queue.put(job, self.left_s[job])
        self._call_one()

    def _has_room(self, device: _Device, job: int) -> bool:
        held = self.tables.held_bytes
        return held is None or device.memory.has_room(held[job][self.position[job]])

    def _copy_in(self, at: int, device: _Device, job: int, free_s: float, cause: int) -> _Next:
        """Copy in a shard, now. ``free_s``, ``cause``: when and after what the device could choose it."""
        now, unit, tables, is_own = self.engine.now_s, self.position[job], self.tables, job == device.running
        if device.buffer.free_s > free_s:
            free_s, cause = device.buffer.free_s, device.buffer.last
        if is_own:
            self.stays[job] = True
        elif self.jobs[job].free_s > free_s:
            free_s, cause = self.jobs[job].free_s, self.jobs[job].last
        if free_s < now <= device.gone.free_s:
            cause = device.gone.last  # There was no room before.
        if tables.held_bytes is not None:
            device.memory.take(now, tables.held_bytes[job][unit])
        seconds = 0.0 if tables.copy_in_s is None else tables.copy_in_s[job][unit]
        if not seconds:
            return _Next(job, now, cause, is_own)
        number = -2 - len(self.copies)
        link = self.links_in[at % len(self.links_in)]
        start, end, cause = link.take(now, cause, seconds, number)
        self.copies.add(job, unit, at, True, start, end, cause)
        return _Next(job, end, number, is_own)

    def _start(self, at: int, device: _Device, chosen: _Next) -> None:
        """Run the unit that is next on a device, now."""
        job, now, held = chosen.job, self.engine.now_s, device.held
        unit = self.position[job]
        seconds = self.tables.seconds[job][unit]
        latest, cause = chosen.ready_s, chosen.cause
        if held.free_s > latest:
            latest, cause = held.free_s, held.last
        if not chosen.is_own and self.jobs[job].free_s > latest:
            cause = self.jobs[job].last
        end = now + seconds
        number = self.log.add(at, now, end, cause)
        self.ran_job.append(job)
        self.ran_unit.append(unit)
        held.free_s, held.last = end, number
        device.running, device.unit, device.next, device.buffer = job, unit, None, device.left
        self.left_s[job] -= seconds
        self.position[job] = unit + 1
        self.stays[job] = False
        self._ask_device(end, at)
        if not self._seconds_out(job, unit):
            self._free_job(job, end, number)
        if self.looks_ahead:
            self.engine.ask_at(max(now, device.buffer.free_s), self.first_buffer + at)

    def _free_job(self, job: int, time_s: float, cause: int) -> None:
        """A job may run its next unit from a time on, if it has one and has not ended."""
        self.jobs[job].free_s, self.jobs[job].last = time_s, cause
        if self.position[job] < self.tables.runs[job]:
            self.engine.ask_at(time_s, job)

    def _seconds_out(self, job: int, unit: int) -> float:
        return 0.0 if self.tables.copy_out_s is None else self.tables.copy_out_s[job][unit]

    def _end(self, at: int, device: _Device) -> bool:
        """See to the end of a device's unit, now: copy its shard out. Returns whether the device is free then."""
        job, unit, now, tables = device.running, device.unit, self.engine.now_s, self.tables
        number = device.held.last
        size = 0 if tables.held_bytes is None else tables.held_bytes[job][unit]
        device.running = NOTHING
        if unit + 1 >= tables.runs[job] and device.next is not None and device.next.is_own:
            if tables.held_bytes is not None:  # It has ended early: what was copied in for it is not needed.
                device.memory.take(now, -tables.held_bytes[job][unit + 1])
            device.next = None
        seconds = self._seconds_out(job, unit)
        if not seconds:
            device.memory.take(now, -size)
            device.left = Resource(now, number)
            return True
        copy = -2 - len(self.copies)
        start, end, cause = self.links_out[at % len(self.links_out)].take(now, number, seconds, copy)
        self.copies.add(job, unit, at, False, start, end, cause)
        if not self.stays[job] or device.next is None:
            self.stays[job] = False
            self._free_job(job, end, copy)
        device.left = Resource(end, copy)
        device.outgoing.append((end, copy, size))
        self.engine.ask_at(end, self.first_leaving + at)
        if self.is_double:
            return True
        device.held.free_s, device.held.last = end, copy
        device.buffer = device.left
        self._ask_device(end, at)
        return False

    def _leave(self, at: int) -> None:
        """The shard of a unit is gone from a device."""
        device, now = self.devices[at], self.engine.now_s
        while device.outgoing and device.outgoing[0][0] <= now:
            device.gone.free_s, device.gone.last, size = device.outgoing.popleft()
            device.memory.take(now, -size)
        if device.running == NOTHING:
            self._ask_device(now, at)
        elif self.looks_ahead and device.next is None:
            self.engine.ask_at(now, self.first_buffer + at)
