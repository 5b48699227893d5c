"""One step of attention, whatever the mode: which layers are gathered and which are read where their pages are.

Steps of one new token a row are decoding; there layers with full attention go by the mode. All else (prefill, draft
tokens to be verified, sliding-window and latent layers) is gathered by ``ExactStream``.
"""

from __future__ import annotations

import contextlib
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
        if mode.kind == "exact-split" and full:
            self.paged = PagedDecode(store)
        elif mode.selection is not None and full:
            self.paged = SelectDecode(store, mode.selection, full)
        #: Layers that are read where their pages are, in a step of decoding.
        self._paged_layers = frozenset(full) if self.paged is not None else frozenset()
        self._streamed = [n for n in self.stream.layers if n not in self._paged_layers]
        self._decoding = False
        self._unread: set[int] = set()
        self._attended = 0
        self._steps = 0
        #: Pages that were only on disk when some were last raised, and the step of it.
        self._cold: tuple[int, int] = (0, 0)

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
    def pages_read(self) -> float | None:
        """Sealed pages that a layer that selects has read in a step, the mean; ``None`` if none has selected."""
        counts = self.paged.counts if isinstance(self.paged, SelectDecode) else {}
        reads = counts.get("layer reads", 0)
        return counts["pages read"] / reads if reads else None

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
            TierFullError: the VRAM tier has no room for summaries.
        """
        if self.paged is None or new != 1:
            return
        if not isinstance(self.paged, SelectDecode):
            self._raise_cold(pages)
            return
        self.paged.reserve([len(row) for row in pages])
        if self._steps % MOVE_EVERY == MOVE_EVERY - 1:
            room = (self.store.sizes["vram"] - self.summary_bytes) // self.store.layout.page_bytes
            # Only what most layers chose comes up, and only others make room for it.
            hottest = self.paged.hottest(room)
            wanted = [page for page in hottest if "vram" not in page.copies]
            if wanted:
                most = max(1, room // MOVE_SHARE)
                self.store.raise_pages(wanted[:most], "vram", keep=hottest)

    def _raise_cold(self, pages: Sequence[Sequence[Page]]) -> None:
        """Bring pages that are only on disk to host memory, as far as it has room that the step's own pages do not
        need. Where there is none left, look again only after a while, or when there are more of them."""
        cold = [p for row in pages for p in row if not {"vram", "host"} & p.copies.keys()]
        count, step = self._cold
        if not cold or (len(cold) == count and self._steps - step < MOVE_EVERY):
            return
        self.store.raise_pages(cold, "host", keep=[p for row in pages for p in row])
        left = sum("host" not in page.copies for page in cold)
        self._cold = (left, self._steps)

    def rearrange(self, rows: Sequence[int]) -> None:
        """Row ``i`` of the coming steps goes on from what was row ``rows[i]``."""
        if self.paged is not None:
            self.paged.rearrange(rows)

    def forget(self) -> None:
        """The rows do not go on from what they were: cut back, or begun anew."""
        if self.paged is not None:
            self.paged.forget()

    def begin(
        self, rows: Sequence[Row], before: int, columns: int, *, in_place: bool = True
    ) -> None:
        """Start a step; see ``ExactStream.begin``.

        Args:
            in_place: whether pages may be read where they are. Not, if a mask hides some of the tokens.
        """
        self._decoding = self.paged is not None and columns - before == 1 and in_place
        self._attended = 0
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
        self._attended += 1
        return self.paged.attend(layer, q, scale, sink)

    def end(self) -> tuple[str, Event]:
        """The step's last layer has been served and read: (stream name, event) that stand for all its work."""
        if isinstance(self.paged, SelectDecode):
            self.paged.stage.end(self.stream.compute)
        stream, event = self.stream.end()
        if self._decoding and self.paged is not None:
            self.paged.end(event)
            # A step that was given up tells nothing.
            if self._attended >= len(self._paged_layers):
                masses = self.paged.masses()
                if masses:
                    self.store.attended(list(masses), list(masses.values()))
        self._decoding = False
        return stream, event

    def close(self) -> None:
        """Free all memory."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.stream.close)
            if self.paged is not None:
                stack.callback(self.paged.close)
