"""Virtual time: queues of work, engines that work them off, and one clock.

A discrete-event simulation. Each queue runs its items in order: work, points (an event was recorded
here) and holds (wait for a point of another queue). Work needs an engine; ``h2d`` and ``d2h`` take
one piece of work at a time in the order it became ready, ``vram`` shares its bandwidth equally
among all work on it. Both copy directions busy slow each other by the duplex factor. Nothing
happens between calls: time moves when somebody spends it or waits, and the same calls give the
same times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Literal

from kvtier.errors import DeadlockError

Engine = Literal["h2d", "d2h", "vram"]


class Work:
    """Something that occupies an engine for ``seconds`` when it has the engine for itself.

    ``begin`` runs when it gets the engine, ``finish`` when it is through; both are dropped after
    use so that what they hold can be freed.
    """

    __slots__ = ("begin", "end_s", "engine", "finish", "left", "queue", "seconds", "start_s")

    def __init__(
        self,
        engine: Engine,
        seconds: float,
        begin: Callable[[], None] | None = None,
        finish: Callable[[Work], None] | None = None,
    ) -> None:
        self.engine = engine
        self.seconds = self.left = seconds
        self.begin = begin
        self.finish = finish
        self.queue: Queue | None = None
        self.start_s = self.end_s = math.nan


class Point:
    """A recorded place in a queue. ``reached`` runs when everything before it has ended."""

    __slots__ = ("at_s", "done", "held", "reached")

    def __init__(self, reached: Callable[[], None] | None = None) -> None:
        self.done = False
        self.at_s = math.nan
        self.held: list[Queue] = []
        self.reached = reached


class Hold:
    """The queue goes on when ``point`` is reached."""

    __slots__ = ("point",)

    def __init__(self, point: Point) -> None:
        self.point = point


class Queue:
    """First in, first out. ``busy`` while its work is on, or waits for, an engine."""

    __slots__ = ("busy", "held", "items", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: deque[Work | Point | Hold] = deque()
        self.busy = False
        self.held = False


class VirtualClock:
    """The time ``now`` in seconds and everything that is queued or running.

    Args:
        duplex: rate of each copy direction while both are busy, 0..1.
        engines: 2, one a direction, or 1 that both take turns on.
    """

    def __init__(self, duplex: float, engines: int = 2) -> None:
        self.now = 0.0
        self._duplex = duplex
        self._running: list[Work] = []
        shared = engines == 1
        #: Direction -> the engine that does its copies.
        self._engine = {"h2d": "h2d", "d2h": "h2d" if shared else "d2h"}
        self._waiting: dict[str, deque[Work]] = {"h2d": deque(), "d2h": deque()}
        self._occupied = {"h2d": False, "d2h": False}

    def push(self, queue: Queue, item: Work | Point | Hold) -> None:
        """Append to a queue; it starts now if nothing is before it."""
        queue.items.append(item)
        self._pump(queue)

    def spend(self, seconds: float) -> None:
        """The host is busy for ``seconds`` while the device works."""
        until = self.now + seconds
        while self._step(until):
            pass

    def rest(self, seconds: float) -> None:
        """The host does something else for ``seconds``."""
        self.spend(seconds)

    def close(self) -> None:
        """Time ends here."""

    def run_until(self, point: Point, deadline_s: float) -> bool:
        """Move time to where ``point`` is reached; False, and time at the deadline, if it is not
        by then.

        Raises:
            DeadlockError: no work that could ever end is left to run.
        """
        while not point.done:
            if not math.isfinite(self._next()[0]):
                raise DeadlockError(
                    f"at {self.now:.6f} s of virtual time the host waits for work that nothing "
                    f"will finish; running: {', '.join(self._names()) or 'nothing'}"
                )
            if not self._step(deadline_s):
                return False
        return True

    def _names(self) -> list[str]:
        return [f"{w.engine} work of queue {w.queue.name!r}" for w in self._running if w.queue]

    def _next(self) -> tuple[float, list[float]]:
        """Seconds until the first running work ends, and the rate of each."""
        running = self._running
        if len(running) == 1:
            return running[0].left, [1.0]
        both = self._occupied["h2d"] and self._occupied["d2h"]
        copy_rate = self._duplex if both else 1.0
        sharing = sum(1 for work in running if work.engine == "vram")
        rates = [1.0 / sharing if w.engine == "vram" else copy_rate for w in running]
        soonest = min((w.left / r for w, r in zip(running, rates, strict=True)), default=math.inf)
        return soonest, rates

    def _step(self, until: float) -> bool:
        """Go to the next end of work; False, and time at ``until``, if that comes first."""
        soonest, rates = self._next()
        running = self._running
        if self.now + soonest > until or soonest == math.inf:
            passed = until - self.now
            if passed > 0 and math.isfinite(passed):
                for work, rate in zip(running, rates, strict=True):
                    work.left = max(0.0, work.left - passed * rate)
                self.now = until
            return False
        ended = []
        for work, rate in zip(running, rates, strict=True):
            if work.left / rate <= soonest:
                ended.append(work)
            else:
                work.left = max(0.0, work.left - soonest * rate)
        self.now += soonest
        for work in ended:
            self._end(work)
        return True

    def _end(self, work: Work) -> None:
        self._running.remove(work)
        work.end_s = self.now
        finish, work.finish = work.finish, None
        queue = work.queue
        assert queue is not None
        queue.busy = False
        if finish is not None:
            finish(work)
        if work.engine != "vram":
            engine = self._engine[work.engine]
            self._occupied[engine] = False
            if self._waiting[engine]:
                self._start(self._waiting[engine].popleft())
        self._pump(queue)

    def _start(self, work: Work) -> None:
        if work.engine != "vram":
            self._occupied[self._engine[work.engine]] = True
        work.start_s = self.now
        self._running.append(work)
        begin, work.begin = work.begin, None
        if begin is not None:
            begin()

    def _pump(self, first: Queue) -> None:
        """Move a queue, and the queues that it releases, as far as they go without time passing."""
        ready = [first]
        while ready:
            queue = ready.pop()
            items = queue.items
            while items and not queue.busy and not queue.held:
                item = items[0]
                if isinstance(item, Work):
                    items.popleft()
                    item.queue = queue
                    queue.busy = True
                    engine = self._engine.get(item.engine)
                    if engine is not None and self._occupied[engine]:
                        self._waiting[engine].append(item)
                    else:
                        self._start(item)
                elif isinstance(item, Hold):
                    if item.point.done:
                        items.popleft()
                    else:
                        queue.held = True
                        item.point.held.append(queue)
                else:
                    items.popleft()
                    item.done = True
                    item.at_s = self.now
                    if item.reached is not None:
                        item.reached()
                        item.reached = None
                    for other in item.held:
                        other.held = False
                    ready.extend(reversed(item.held))
                    item.held = []
