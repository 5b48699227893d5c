"""Keeps a database mapped while it is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.errors import DeadlineExceededError


class Gate:
    """Lets readers in side by side, and one owner alone: unmapping under a reader would kill the
    process.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._cond = threading.Condition()
        self._inside = 0
        #: Those who are alone inside, or want to be.
        self._owners = 0
        self._owned = False

    def __enter__(self) -> None:
        with self._cond:
            if self._owners and not self._cond.wait_for(lambda: not self._owners, self._patience_s):
                raise DeadlineExceededError(
                    f"the disk tier was not readable again within {self._patience_s:.1f} s"
                )
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._cond:
            self._inside -= 1
            if self._owners:
                self._cond.notify_all()

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        """Keeps new readers waiting and waits for those inside, and for another owner, at most ``timeout_s``."""
        with self._cond:
            self._owners += 1
        owned = False
        try:
            with self._cond:
                if not self._cond.wait_for(
                    lambda: not self._inside and not self._owned, max(0.0, timeout_s)
                ):
                    raise DeadlineExceededError(
                        f"{self._inside} reads did not end within {timeout_s:.1f} s"
                    )
                self._owned = owned = True
            yield
        finally:
            with self._cond:
                self._owners -= 1
                if owned:
                    self._owned = False
                self._cond.notify_all()
