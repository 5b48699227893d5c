"""Copies of many small pieces by a kernel: ``kvtier.kernels.move_pieces``, on the stream of the copy.

The kernel reads the addresses of the pieces from a list in VRAM, which a list in pinned host memory is uploaded to on
the same stream. Both lists are reused once an event behind the kernel is done, which is only asked, never waited for:
when all are in flight, the copy goes another way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kvtier.devices.base import Event
from kvtier.devices.cards import Direction
from kvtier.devices.parts import Piece
from kvtier.kernels.launch import Launcher
from kvtier.kernels.moves import move_pieces

#: Pieces of one launch; their list has 24 bytes a piece.
PIECES_A_LAUNCH = 4096

#: Launches in flight. Together their lists take 1.5 MiB of VRAM and as much pinned memory, once all were in use.
MAX_LISTS = 16

#: Thread blocks of a copy over the link. Not measured: 32 blocks of 256 threads with four 16-byte words each have
#: 512 KiB in flight, several times what a link of 64 GB/s with 2 us of latency holds, and leave the rest of the
#: multiprocessors to the model.
LINK_BLOCKS = 32


class Lists(NamedTuple):
    """int64 ``[3, PIECES_A_LAUNCH]``: destinations, sources, sizes. ``host`` is pinned, ``vram`` on the card."""

    host: torch.Tensor
    vram: torch.Tensor


class SmallMoves:
    """Copies small pieces in one launch for each ``PIECES_A_LAUNCH`` of them; threads may call it at once.

    Args:
        launcher: gives what launches kernels on the card, None if nothing does; asked at every copy.
        alloc: gives fresh lists that no pending work touches, None if there is no memory for them.
        record: an event behind all work of a stream so far.
    """

    def __init__(
        self,
        launcher: Callable[[], Launcher | None],
        alloc: Callable[[], Lists | None],
        record: Callable[[Any], Event],
    ) -> None:
        self._launcher, self._alloc, self._record = launcher, alloc, record
        self._lock = threading.Lock()
        self._idle: list[Lists] = []
        self._busy: list[tuple[Event, Lists]] = []
        self._made = 0

    def __call__(self, pieces: Sequence[Piece], direction: Direction, stream: Any) -> bool:
        """Submit the copy to ``stream``, which is torch's current one.

        Returns:
            False, with nothing submitted, if there is no launcher or not enough lists are idle.
        """
        launcher = self._launcher()
        if launcher is None:
            return False
        batches = [
            pieces[at : at + PIECES_A_LAUNCH] for at in range(0, len(pieces), PIECES_A_LAUNCH)
        ]
        taken = self._take(len(batches))
        if taken is None:
            return False
        blocks = None if direction == "d2d" else LINK_BLOCKS
        try:
            for batch, lists in zip(batches, taken, strict=True):
                _submit(batch, lists, blocks, launcher)
        finally:
            # Also after a failure: an upload may be pending.
            event = self._record(stream)
            with self._lock:
                self._busy += [(event, lists) for lists in taken]
        return True

    def _take(self, number: int) -> list[Lists] | None:
        with self._lock:
            done = [event.done() for event, _ in self._busy]
            pairs = list(zip(done, self._busy, strict=True))
            self._idle += [lists for idle, (_, lists) in pairs if idle]
            self._busy = [busy for idle, busy in pairs if not idle]
            if number > len(self._idle) + MAX_LISTS - self._made:
                return None
            while len(self._idle) < number:
                lists = self._alloc()
                if lists is None:
                    return None
                self._made += 1
                self._idle.append(lists)
            return [self._idle.pop() for _ in range(number)]


def _submit(pieces: Sequence[Piece], lists: Lists, blocks: int | None, launcher: Launcher) -> None:
    count = len(pieces)
    rows = torch.tensor(
        [
            [piece.dst.raw().data_ptr() + piece.dst_start for piece in pieces],
            [piece.src.raw().data_ptr() + piece.src_start for piece in pieces],
            [piece.nbytes for piece in pieces],
        ],
        dtype=torch.int64,
        device="cpu",  # whatever torch's default device is
    )
    # Packed at the front, so that one contiguous upload takes all three.
    host, vram = lists.host.view(-1)[: 3 * count], lists.vram.view(-1)[: 3 * count]
    host.copy_(rows.view(-1))
    vram.copy_(host, non_blocking=True)
    destinations, sources, sizes = vram.view(3, count)
    largest = max(piece.nbytes for piece in pieces)
    move_pieces(destinations, sources, sizes, largest=largest, blocks=blocks, launcher=launcher)
