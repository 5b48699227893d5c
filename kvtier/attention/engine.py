"""One step of attention, whatever the mode: which layers are gathered and which are read where their pages are.

Steps of one new token a row are decoding; there layers with full attention go by the mode. All else (prefill, draft
tokens to be verified, sliding-window and latent layers) is gathered by ``ExactStream``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from kvtier.attention.mode import Mode
from kvtier.attention.paged import PagedDecode
from kvtier.attention.select import Foresight, SelectDecode
from kvtier.attention.stream import ExactStream
from kvtier.attention.window import Row
from kvtier.devices.base import Event
from kvtier.store.page import Page
from kvtier.store.store import TieredStore

F = TypeVar("F", bound=Foresight)

#: Steps between two looks at which pages should be in VRAM.
MOVE_EVERY = 8

#: Share of the VRAM tier's pages that move up at a look, at most.
MOVE_SHARE = 16


class AttentionEngine:
    """Serves the layers of one batch of sequences, step by step.

    Args:
        store: where the pages are.
        mode: how to read them.
        columns: tokens to make staging room for at first.

    Raises:
        ConfigError: the mode does not fit the store's layout.
    """

    def __init__(self, store: TieredStore, mode: Mode, *, columns: int = 0) -> None:
        self.store = store
        self.mode = mode
        self.stream = ExactStream(store, columns=columns)
        full = [n for n, layer in enumerate(store.layout.layers) if layer.kind == "full"]
        self.paged: PagedDecode | None = None
        if mode.kind == "exact-split":
            self.paged = PagedDecode(store)
        elif mode.selection is not None:
            self.paged = SelectDecode(store, mode.selection, full)
        #: Layers that are read where their pages are, in a step of decoding.
        self._paged_layers = frozenset(full) if self.paged is not None else frozenset()
        self._streamed = [n for n in self.stream.layers if n not in self._paged_layers]
        self._decoding = False
        self._unread: set[int] = set()
        self._steps = 0

    @property
    def staging_bytes(self) -> int:
        """VRAM outside the tier in which planes are gathered."""
        more = self.paged.stage.nbytes if isinstance(self.paged, SelectDecode) else 0
        return self.stream.nbytes + more

    @property
    def summary_bytes(self) -> int:
        """VRAM in which the summaries of all pages are kept, taken from the tier."""
        return self.paged.summary_bytes if isinstance(self.paged, SelectDecode) else 0

    @property
    def unread(self) -> frozenset[int]:
        """Layers of this step that were to be read by ``attend`` and have not been."""
        return frozenset(self._unread)

    def foresee(self, foresight: F) -> F:
        """Have the next layer's queries guessed by ``foresight``, for ``prefetch=hidden``."""
        if isinstance(self.paged, SelectDecode):
            self.paged.foresight = foresight
        return foresight

    def prepare(self, pages: Sequence[Sequence[Page]], new: int) -> None:
        """Move pages before a step of ``new`` tokens a row, while nothing pins them: what is only on disk to host
        memory (``exact-split``), what has been chosen of late to VRAM (``select``).

        Raises:
            DeviceOOMError, TierFullError: there is no VRAM for summaries.
        """
        if self.paged is None or new != 1:
            return
        if not isinstance(self.paged, SelectDecode):
            cold = [p for row in pages for p in row if not {"vram", "host"} & p.copies.keys()]
            if cold:
                self.store.raise_pages(cold, "host")
            return
        self.paged.reserve([len(row) for row in pages])
        if self._steps % MOVE_EVERY == MOVE_EVERY - 1:
            most = max(1, self.store.sizes["vram"] // self.store.layout.page_bytes // MOVE_SHARE)
            wanted = [page for row in self.paged.wanted() for page in row]
            if wanted:
                self.store.raise_pages(wanted[:most], "vram")

    def begin(self, rows: Sequence[Row], before: int, columns: int) -> None:
        """Start a step; see ``ExactStream.begin``."""
        self._decoding = self.paged is not None and columns - before == 1
        self.stream.begin(rows, before, columns, self._streamed if self._decoding else None)
        self._unread.clear()
        if self._decoding:
            assert self.paged is not None
            self.paged.begin(rows)
            self._steps += 1

    @property
    def exact(self) -> bool:
        """Whether this step reads every page in every layer, so that what it appends is what the model would."""
        return not (
            self._decoding and isinstance(self.paged, SelectDecode) and self.paged.leaves_out
        )

    def reads_in_place(self, layer: int) -> bool:
        """Whether this step's attention of a layer is to be got from ``attend``."""
        return self._decoding and layer in self._paged_layers

    def update(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's new K and V and return all that the layer attends to, see ``ExactStream.update``; of a
        layer that is read in place, only the new ones."""
        if not self.reads_in_place(layer):
            return self.stream.update(layer, k, v)
        self.stream.append(layer, k, v)
        self._unread.add(layer)
        return k, v

    def attend(
        self, layer: int, q: torch.Tensor, scale: float | None, sink: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``PagedDecode.attend``."""
        assert self.paged is not None
        self._unread.discard(layer)
        return self.paged.attend(layer, q, scale, sink)

    def end(self) -> tuple[str, Event]:
        """The step's last layer has been served and read: (stream name, event) that stand for all its work."""
        if isinstance(self.paged, SelectDecode):
            self.paged.stage.end(self.store.device.compute_stream())
        stream, event = self.stream.end()
        if self._decoding and self.paged is not None:
            self.paged.end(event)
            if not self._unread:
                for keys, shares in self.paged.masses():
                    self.store.attended(keys, shares)
        self._decoding = False
        return stream, event

    def close(self) -> None:
        """Free all memory."""
        if self.paged is not None:
            self.paged.close()
        self.stream.close()
