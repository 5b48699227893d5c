"""From disk: whole pages into host memory, several at once, and single planes.

Every byte is checked before it counts. A page that is damaged is gone from disk, whoever holds it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from kvtier.mover import write_host
from kvtier.store.page import Page
from kvtier.store.room import Room
from kvtier.tiers.aligned import aligned_buffer
from kvtier.tiers.codec import PageCodec, alike, recode
from kvtier.tiers.memory import Slot

#: Read at once at most, so that the copies to VRAM of what was read before go on meanwhile.
_READ_BYTES = 16 << 20
_LINK = "disk->host"


class Reads(Room):
    """A residence that reads from disk."""

    @property
    def reads_at_once(self) -> int:
        """Pages that may be read in one call. Half of the bounce slots: through the others the pages before them go
        up."""
        return max(1, min(self.bounce.capacity_pages // 2, _READ_BYTES // self.disk_page_bytes))

    def fetch(self, pages: Sequence[Page], slots: Sequence[Slot], deadline: float) -> list[bool]:
        """Pages that are on disk into host slots, coded as these are; for each whether it was good.

        Raises:
            DiskError: the system refuses to read; the pages may still be good.
        """
        outs = [
            self.device.host(write_host(self.device, slot, deadline), write=True).numpy()
            for slot in slots
        ]
        return self.read_pages(pages, outs, [slot.codec for slot in slots])

    def read_pages(
        self,
        pages: Sequence[Page],
        outs: Sequence[np.ndarray],
        codecs: Sequence[PageCodec | None],
    ) -> list[bool]:
        """Pages that are on disk into ``outs``, uint8, coded by ``codecs``. As ``fetch``."""
        of = self.disk_codec
        found = [
            out if alike(codec, of) else aligned_buffer(self.disk_page_bytes)
            for out, codec in zip(outs, codecs, strict=True)
        ]
        results = self._read_records(pages, found)
        for out, data, codec, good in zip(outs, found, codecs, results, strict=True):
            if not good:
                continue
            if data is not out:
                recode(torch.from_numpy(data), of, torch.from_numpy(out), codec)
            elif codec is not None and codec is not of:
                codec.note(codec.facts_of(torch.from_numpy(out)[None]))
        return results

    def _read_records(self, pages: Sequence[Page], outs: Sequence[np.ndarray]) -> list[bool]:
        """As they are on disk."""
        assert self.disk is not None
        began = time.monotonic()
        results = self.disk.read_pages([page.key for page in pages], outs)
        good = sum(results)
        for count, failed in ((good, False), (len(pages) - good, True)):
            if count:
                nbytes = count * self.disk_page_bytes
                self.mover.copied(_LINK, nbytes, began, began, failed=failed)
        self.mover.links[_LINK].add(good * self.disk_page_bytes, good)
        self._lose(pages, results)
        return results

    def read_planes(
        self, pages: list[Page], plane: int, outs: list[np.ndarray], layer: int | None = None
    ) -> list[bool]:
        """One plane of each of several pages on disk, checked, decoded as that of ``layer``; None: what is not coded."""
        assert self.disk is not None
        codec = None if layer is None else self.disk_codec
        found = outs
        if codec is not None and layer is not None:
            coded = np.empty((len(pages), codec.plane(layer).nbytes), np.uint8)
            found = list(coded)
        results = self.disk.read_planes([page.key for page in pages], plane, found)
        link = self.mover.links[_LINK]
        for data, out, good in zip(found, outs, results, strict=True):
            if not good:
                continue
            link.add(len(data))
            if codec is not None and layer is not None:
                raw = torch.from_numpy(out)[None]
                codec.decode_planes(layer, torch.from_numpy(data)[None], raw)
        self._lose(pages, results)
        return results

    def _lose(self, pages: Sequence[Page], results: Sequence[bool]) -> None:
        for page, good in zip(pages, results, strict=True):
            if not good:
                self.damaged += 1
                self.lose(page, "disk")
