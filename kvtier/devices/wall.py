"""Wall time: the emulated device in slow motion, with a thread that waits for every end of work.

For smoke tests with real threads. ``dilation`` seconds of real time pass for one second of the
device, so that the emulator's own work (Python, memory copies) does not swamp what it emulates.
What the host spends is its real time; the modelled cost of a submission is not added. Times in
deadlines are the device's, as in virtual time. Where two ends of work fall depends on real threads,
so runs differ in their last digits; for results use virtual time.
"""

from __future__ import annotations

import math
import threading
import time

from kvtier.devices.clock import Hold, Point, Queue, VirtualClock, Work
from kvtier.errors import ConfigError, DeadlockError

_CLOSE_TIMEOUT_S = 5.0


class WallClock(VirtualClock):
    """A clock that follows real time.

    Args:
        duplex, engines: see ``VirtualClock``.
        lock: the device's; held by every caller, given up while one waits.
        dilation: real seconds per second of the device, > 0.
    """

    def __init__(
        self,
        duplex: float,
        engines: int,
        lock: threading.RLock,
        dilation: float,
    ) -> None:
        if not 0.0 < dilation < math.inf:
            raise ConfigError(f"dilation is {dilation}; give real seconds per device second, > 0")
        super().__init__(duplex, engines)
        self._changed = threading.Condition(lock)
        self._dilation = dilation
        self._began = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="kvtier-wall-clock", daemon=True)
        self._thread.start()

    def push(self, queue: Queue, item: Work | Point | Hold) -> None:
        self._catch_up()
        super().push(queue, item)
        self._changed.notify_all()

    def spend(self, seconds: float) -> None:
        self._catch_up()

    def rest(self, seconds: float) -> None:
        until = self._real() + seconds
        while (left := until - self._real()) > 0:
            self._wait(left)
        self._catch_up()

    def run_until(self, point: Point, deadline_s: float) -> bool:
        self._catch_up()
        while not point.done:
            soonest = self._next()[0]
            if not math.isfinite(soonest):
                raise DeadlockError(
                    f"at {self.now:.6f} s of device time a thread waits for work that nothing will "
                    f"finish; running: {', '.join(self._names()) or 'nothing'}"
                )
            if self.now >= deadline_s:
                return False
            self._wait(min(soonest, deadline_s - self.now))
            self._catch_up()
        return True

    def close(self) -> None:
        """End the thread. The caller holds the lock."""
        self._closed = True
        self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread; the caller does not hold the lock. Bounded."""
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _real(self) -> float:
        """Device seconds that have really passed."""
        return (time.monotonic() - self._began) / self._dilation

    def _catch_up(self) -> None:
        """Let everything happen whose time has come."""
        super().spend(max(0.0, self._real() - self.now))

    def _wait(self, seconds: float) -> None:
        self._changed.wait(min(seconds * self._dilation, 1.0))

    def _follow(self) -> None:
        with self._changed:
            while not self._closed:
                self._catch_up()
                self._changed.notify_all()
                soonest = self._next()[0]
                self._changed.wait(min(soonest * self._dilation, 1.0))
