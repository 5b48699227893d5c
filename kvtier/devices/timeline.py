"""Streams and events of an emulated device: who is ordered behind whom, and when things happen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtier.devices.base import Event
from kvtier.devices.clock import Engine, Hold, Point, VirtualClock, Work
from kvtier.devices.handles import EmulatedEvent, EmulatedStream
from kvtier.devices.operations import Operation
from kvtier.devices.races import Access, Clock, join
from kvtier.errors import ConfigError, DeadlineExceededError

if TYPE_CHECKING:
    from kvtier.devices.emulated import EmulatedDevice

#: Seconds that recording, waiting for or querying an event takes the host; assumed.
EVENT_CALL_S = 1e-6


class Timeline:
    """The streams of one device in one clock. The caller holds the device's lock.

    Args:
        device: whose streams they are.
        clock: when things happen.
        check_races: whether ``order`` checks anything.
    """

    def __init__(self, device: EmulatedDevice, clock: VirtualClock, check_races: bool) -> None:
        self.clock = clock
        #: What the host has waited for.
        self.host: Clock = []
        self.streams: dict[str, EmulatedStream] = {}
        self._device = device
        self._check_races = check_races

    def stream(self, name: str) -> EmulatedStream:
        found = self.streams.get(name)
        if found is None:
            for clock in (self.host, *(stream.clock for stream in self.streams.values())):
                clock.append(0)
            found = EmulatedStream(self._device, name, len(self.streams), list(self.host))
            self.streams[name] = found
        return found

    # events

    def record(self, stream: EmulatedStream) -> EmulatedEvent:
        self.clock.spend(EVENT_CALL_S)
        event = EmulatedEvent(stream)
        self.clock.push(stream.queue, event.point)
        return event

    def hold(self, stream: EmulatedStream, event: Event) -> None:
        if not isinstance(event, EmulatedEvent) or event.device is not self._device:
            raise ConfigError(
                f"stream {stream.name!r} of {self._device.name} got an event of another device"
            )
        self.clock.spend(EVENT_CALL_S)
        join(stream.clock, event.clock)
        if not event.point.done:
            self.clock.push(stream.queue, Hold(event.point))

    def query(self, event: EmulatedEvent) -> bool:
        self.clock.spend(EVENT_CALL_S)
        if event.point.done:
            join(self.host, event.clock)
        return event.point.done

    def reach(self, event: EmulatedEvent, deadline_s: float, timeout_s: float) -> None:
        """Let the host wait until ``event``, or raise DeadlineExceededError."""
        if not self.clock.run_until(event.point, deadline_s):
            raise DeadlineExceededError(
                f"an event of {self._device.name} was not reached within {timeout_s} s of virtual "
                "time; the work before it is slow or stalled: wait longer, or give its pages up"
            )
        join(self.host, event.clock)

    # work

    def order(self, operation: Operation) -> None:
        """Check an operation against everything before it and enter it into the logs."""
        if not self._check_races:
            return
        stream, clock, host = operation.stream, operation.stream.clock, self.host
        join(clock, host)
        clock[stream.index] += 1
        access = Access(stream.index, clock[stream.index], operation)
        for buffer, start, stop in operation.reads:
            buffer.log.read(start, stop, clock, access, host, operation)
        for buffer, start, stop in operation.writes:
            buffer.log.write(start, stop, clock, access, operation)

    def submit(self, operation: Operation, engine: Engine, seconds: float, cost: float) -> None:
        """Queue an operation that takes ``seconds``; handing it over costs the host ``cost``."""
        self.clock.spend(cost)
        operation.submitted_s = self.clock.now
        work = Work(engine, seconds, operation.begin, operation.finish)
        self.clock.push(operation.stream.queue, work)

    def finish(self, stream: EmulatedStream) -> None:
        """Let time run until the stream is empty. The host does not count as having waited."""
        point = Point()
        self.clock.push(stream.queue, point)
        self.clock.run_until(point, math.inf)
