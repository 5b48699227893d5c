"""The block table: where the pages of a sequence lie."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from kvtier.errors import LayoutError
from kvtier.kernels.checks import check_count, check_device
from kvtier.layout import PLANE_ALIGN

#: Of the pages in one slab: its number, their rows in the table, and where they begin, in 16 bytes.
_Places = tuple[int, torch.Tensor, torch.Tensor]


class PageTable:
    """A list of pages in slabs, in the order in which kernels visit them.

    A kernel gets one 64-bit address and one token count a page, so pages may lie in any slabs. Everything is
    checked here, once, on the host; the kernels trust it. The table keeps its slabs alive, not their contents:
    whoever evicts a page has to know that a table names it.

    Args:
        slabs: ``uint8 [n]`` each, contiguous, 16-byte aligned, all on one device.
        pages: (index of the slab, first byte in it) of each page; the byte a multiple of 16.
        page_bytes: bytes of a page.
        page_tokens: tokens that fit into a page.
        tokens: tokens that each page holds, 1 to ``page_tokens``; default: all are full.

    Attributes:
        addresses: int64 ``[pages]`` on the slabs' device.
        tokens: int32 ``[pages]`` on the slabs' device.
        distinct: whether no page is named twice.

    Raises:
        LayoutError: a slab, a page or a count is not as above; the message names it.
    """

    def __init__(
        self,
        slabs: Sequence[torch.Tensor],
        pages: Sequence[tuple[int, int]],
        *,
        page_bytes: int,
        page_tokens: int,
        tokens: Sequence[int] | None = None,
    ) -> None:
        check_count("page_bytes", page_bytes)
        check_count("page_tokens", page_tokens)
        if not slabs:
            raise LayoutError("slabs is empty; give at least one, its device is the table's")
        for index, slab in enumerate(slabs):
            _check_slab(f"slabs[{index}]", slab, slabs[0].device)
        for index, (number, start) in enumerate(pages):
            _check_page(f"pages[{index}]", number, start, slabs, page_bytes)
        counts = [page_tokens] * len(pages) if tokens is None else list(tokens)
        if len(counts) != len(pages):
            raise LayoutError(f"tokens has {len(counts)} entries for {len(pages)} pages")
        for index, count in enumerate(counts):
            if not 1 <= count <= page_tokens:
                raise LayoutError(
                    f"tokens[{index}] is {count}; a page holds 1 to page_tokens={page_tokens} tokens"
                )
        self.slabs = tuple(slabs)
        self.pages = tuple((int(number), int(start)) for number, start in pages)
        self.page_bytes = page_bytes
        self.page_tokens = page_tokens
        self.counts = tuple(counts)
        self.device = slabs[0].device
        addresses = [slabs[number].data_ptr() + start for number, start in self.pages]
        self.distinct = len(set(addresses)) == len(addresses)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.tokens = torch.tensor(counts, dtype=torch.int32, device=self.device)
        self._places: list[_Places] | None = None

    @property
    def full(self) -> bool:
        """Whether every page is."""
        return all(count == self.page_tokens for count in self.counts)

    def __len__(self) -> int:
        return len(self.pages)

    def take(self, rows: Sequence[int]) -> PageTable:
        """The table of some of the pages, by their place in this one. Nothing is checked again.

        Raises:
            LayoutError: there is no such place.
        """
        for row in rows:
            if not 0 <= row < len(self):
                raise LayoutError(f"rows has {row}; the table has {len(self)} pages")
        taken = copy.copy(self)
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.device)
        taken.pages = tuple(self.pages[row] for row in rows)
        taken.counts = tuple(self.counts[row] for row in rows)
        taken.addresses, taken.tokens = self.addresses[index], self.tokens[index]
        taken.distinct = self.distinct and len(set(rows)) == len(rows)
        taken._places = None
        return taken

    def check_range(self, name: str, start: int, nbytes: int) -> None:
        """Raises LayoutError if bytes ``start`` to ``start + nbytes`` are not inside a page."""
        if start < 0 or nbytes < 1 or start + nbytes > self.page_bytes:
            raise LayoutError(
                f"{name}: bytes {start} to {start + nbytes} are not inside a page of {self.page_bytes} bytes"
            )

    def read(self, start: int, nbytes: int) -> torch.Tensor:
        """Reference: a copy of these bytes of each page, uint8 ``[pages, nbytes]``."""
        word = _word(start, nbytes)
        places = self._by_slab()
        if len(places) == 1:
            number, _, starts = places[0]
            return self._windows(number, start, nbytes, word)[starts].view(torch.uint8)
        out = torch.empty(len(self), nbytes, dtype=torch.uint8, device=self.device)
        for number, rows, starts in places:
            out.view(word)[rows] = self._windows(number, start, nbytes, word)[starts]
        return out

    def write(self, start: int, values: torch.Tensor) -> None:
        """Reference: the inverse of ``read``."""
        values = values.contiguous()
        word = _word(start, values.shape[1], values.data_ptr())
        for number, rows, starts in self._by_slab():
            target = self._windows(number, start, values.shape[1], word)
            target[starts] = values.view(word)[rows]

    def _by_slab(self) -> list[_Places]:
        """Made once: the same tables are read layer by layer and step by step."""
        if self._places is None:
            entries: dict[int, list[tuple[int, int]]] = {}
            for row, (number, start) in enumerate(self.pages):
                entries.setdefault(number, []).append((row, start // PLANE_ALIGN))
            # What is made under inference_mode can be of no use outside it.
            with torch.inference_mode(False):
                both = {
                    number: torch.tensor(rows, dtype=torch.int64, device=self.device)
                    for number, rows in entries.items()
                }
                self._places = [
                    (number, x[:, 0].contiguous(), x[:, 1].contiguous())
                    for number, x in both.items()
                ]
        return self._places

    def _windows(self, number: int, start: int, nbytes: int, word: torch.dtype) -> torch.Tensor:
        """Overlapping views of a slab, one every 16 bytes: where ``start`` of a page that begins there is."""
        slab, size = self.slabs[number], word.itemsize
        count = (slab.numel() - start - nbytes) // PLANE_ALIGN + 1
        words = slab[start : start + (slab.numel() - start) // size * size].view(word)
        return words.as_strided(
            (count, nbytes // size), (PLANE_ALIGN // size, 1), words.storage_offset()
        )


def _word(*sizes: int) -> torch.dtype:
    """Whole words copy several times faster than bytes."""
    return torch.uint8 if any(size % 8 for size in sizes) else torch.int64


def _check_slab(name: str, slab: torch.Tensor, device: torch.device) -> None:
    if not isinstance(slab, torch.Tensor) or slab.dtype != torch.uint8 or slab.dim() != 1:
        given = f"{slab.dtype} {list(slab.shape)}" if isinstance(slab, torch.Tensor) else type(slab)
        raise LayoutError(f"{name} is {given}; it must be a torch.uint8 tensor of one dimension")
    check_device(name, slab, device)
    if not slab.is_contiguous():
        raise LayoutError(f"{name} has stride {slab.stride(0)}; it must be contiguous")
    if slab.data_ptr() % PLANE_ALIGN:
        raise LayoutError(
            f"{name} begins {slab.data_ptr() % PLANE_ALIGN} bytes after a multiple of {PLANE_ALIGN}; "
            "slabs must be aligned for 16-byte loads"
        )


def _check_page(
    name: str, number: int, start: int, slabs: Sequence[torch.Tensor], page_bytes: int
) -> None:
    if not 0 <= number < len(slabs):
        raise LayoutError(f"{name} names slab {number}; there are {len(slabs)}")
    if start % PLANE_ALIGN:
        raise LayoutError(f"{name} begins at byte {start}; it must be a multiple of {PLANE_ALIGN}")
    if start < 0 or start + page_bytes > slabs[number].numel():
        raise LayoutError(
            f"{name}: bytes {start} to {start + page_bytes} are not inside slab {number}, "
            f"which has {slabs[number].numel()}"
        )
