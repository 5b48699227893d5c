"""What must hold of each kernel, wherever it runs: on the CPU through the shim, under a sanitizer, on a GPU.

A body gets a ``Place`` and compares the kernel there with the torch reference on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from places import DTYPES, Pages, Place, attention_layout, near, same

from kvtier.kernels.attention import Partial, merge, merge_partials, partial_attention
from kvtier.kernels.mass import add_page_mass
from kvtier.kernels.moves import move_pieces
from kvtier.kernels.pages import gather_pages, scatter_pages
from kvtier.kernels.quantise import FORMATS, dequantise, quantise_keys, quantise_values
from kvtier.kernels.scores import arkbox_scores, quest_scores
from kvtier.kernels.summary import PageSummaries, summarise_pages
from kvtier.kernels.table import PageTable
from kvtier.layout import LayerLayout, PageLayout

# ------------------------------------------------------------------------------------ pages

#: (start, bytes, row stride or None) that exercise each word width, tails, and grid strides.
RUNS = [
    (0, None, None),
    (16, 4096 + 48, None),
    (32, 1000, None),
    (32, 1005, 1008),
    (4, 996, None),
    (3, 77, None),
    (1, 5000, None),
    (16, 7, 16),
]


def moves(
    place: Place, runs: list[tuple[int, int | None, int | None]] = RUNS, count: int = 5
) -> None:
    layout = attention_layout(2, 48, torch.float16, 16, layers=2)
    for start, nbytes, stride in runs:
        for blocks in (None, 2):
            case = f"start {start}, {nbytes} bytes, stride {stride}, {blocks} blocks"
            pages = Pages.make(place, layout, count=count)
            nbytes = layout.page_bytes - start if nbytes is None else nbytes
            rows = torch.full((count, stride or nbytes), 7, dtype=torch.uint8)
            (out,) = place.put(rows)
            gather_pages(
                pages.there,
                out[:, :nbytes],
                start=start,
                nbytes=nbytes,
                blocks=blocks,
                launcher=place.launcher,
            )
            gather_pages(pages.here, rows[:, :nbytes], start=start, nbytes=nbytes)
            expected = torch.stack(
                [
                    pages.here.slabs[n][at + start : at + start + nbytes]
                    for n, at in pages.here.pages
                ]
            )
            same(rows[:, :nbytes], expected, f"gather reference, {case}")
            same(out, rows, f"gather, {case}")

            fresh = torch.randint(0, 256, rows.shape, dtype=torch.uint8)
            (packed,) = place.put(fresh)
            scatter_pages(
                pages.there, packed[:, :nbytes], start=start, blocks=blocks, launcher=place.launcher
            )
            scatter_pages(pages.here, fresh[:, :nbytes], start=start)
            for got, want in zip(pages.there.slabs, pages.here.slabs, strict=True):
                same(got, want, f"scatter, {case}")


def moves_small(place: Place) -> None:
    moves(place, [(32, 1005, 1008), (1, 2100, None), (4, 996, None)], count=2)


#: (destination after a multiple of 16, source after one, bytes): each word width, tails, grid strides.
PIECES = [
    (0, 0, 20_000),
    (0, 0, 4096 + 15),
    (0, 0, 7),
    (0, 4, 5003),
    (12, 0, 1030),
    (4, 8, 3),
    (0, 1, 2100),
    (3, 0, 77),
    (5, 7, 0),
    (2, 6, 2001),
    (0, 0, 33),
]


def pieces(place: Place, cases: list[tuple[int, int, int]] = PIECES) -> None:
    room = sum(size + 32 for *_, size in cases)
    for blocks in (None, 2):
        old = torch.full((room,), 7, dtype=torch.uint8)
        new = torch.randint(0, 256, (room,), dtype=torch.uint8)
        dst, src = place.put(old.clone(), new)
        on_gpu = place.device.type == "cuda"
        # Fresh memory of an allocator begins at a multiple of 16; on a GPU the second way is from
        # host memory, which the kernel reads through its unified address.
        for source in (src, new.pin_memory()) if on_gpu else (src,):
            dst.copy_(old)
            rows, expected, to, of = [], old.clone(), 0, 0
            for shift_to, shift_of, size in cases:
                start, begin = to + shift_to, of + shift_of
                rows.append((dst.data_ptr() + start, source.data_ptr() + begin, size))
                expected[start : start + size] = new[begin : begin + size]
                to, of = (-(-(at + size) // 16) * 16 for at in (start, begin))
            lists = torch.tensor(rows[::-1]).t().contiguous()
            if not on_gpu:
                move_pieces(*lists)
                same(dst, expected, "pieces, reference")
                dst.copy_(old)
            move_pieces(*lists.to(place.device), blocks=blocks, launcher=place.launcher)
            same(dst, expected, f"pieces, {blocks} blocks")


def pieces_small(place: Place) -> None:
    pieces(place, [(0, 0, 16_500), (0, 0, 47), (0, 4, 1030), (12, 0, 519), (3, 0, 77), (0, 0, 5)])


# ---------------------------------------------------------------------------------- summary

SUMMARY_CASES = [
    ("f32", 2, 8, 5),
    ("f16", 2, 64, 16),
    ("bf16", 3, 24, 7),
    ("f32", 1, 3, 3),
    ("f16", 3, 3, 2),
    ("bf16", 1, 5, 4),
]


def summaries(place: Place, cases: list[tuple[str, int, int, int]] = SUMMARY_CASES) -> None:
    for name, heads, dim, page_tokens in cases:
        dtype = DTYPES[name]
        layout = attention_layout(heads, dim, dtype, page_tokens)
        counts = [page_tokens, 1, page_tokens, max(1, page_tokens - 1)]
        pages = Pages.make(place, layout, count=4, dtype=dtype, tokens=counts)
        part = layout.plane(1).k
        what: dict[str, Any] = {"start": part.offset, "heads": heads, "dim": dim, "dtype": dtype}
        got = summarise_pages(pages.there, **what, launcher=place.launcher)
        want = summarise_pages(pages.here, **what)
        case = f"summary {name} {heads}x{dim}"
        # Sums are in the same order, so that float32 is the same to the last bit as well.
        same(got, want, case)
        for row, (number, at) in enumerate(pages.here.pages):
            raw = pages.here.slabs[number][at + part.offset : at + part.stop]
            keys = raw.view(dtype).view(page_tokens, heads, dim)[: counts[row]].float()
            low, high = keys.amin(0), keys.amax(0)
            plain = torch.stack([low, high, keys.mean(0), (keys - (low + high) / 2).abs().mean(0)])
            near(want[row].float(), plain, f"{case} reference", 1e-6 if name == "f32" else 1e-2)


def summaries_small(place: Place) -> None:
    summaries(place, [("f16", 2, 16, 4), ("bf16", 1, 5, 4)])


# ----------------------------------------------------------------------------------- scores

SCORE_CASES = [
    ("f32", 2, 2, 33, 9),
    ("f16", 2, 3, 64, 19),
    ("bf16", 1, 1, 512, 8),
    ("bf16", 3, 4, 128, 3),
]


def scores(place: Place, cases: list[tuple[str, int, int, int, int]] = SCORE_CASES) -> None:
    for name, kv_heads, group, dim, count in cases:
        dtype = DTYPES[name]
        layout = attention_layout(kv_heads, dim, dtype, 8, layers=1)
        pages = Pages.make(place, layout, count=count, dtype=dtype)
        what: dict[str, Any] = {"start": 0, "heads": kv_heads, "dim": dim, "dtype": dtype}
        summary = summarise_pages(pages.here, **what)
        q = torch.randn(kv_heads * group, dim).to(dtype)
        q_there, summary_there = place.put(q, summary)
        for score in (quest_scores, arkbox_scores):
            case = f"{score.__name__} {name} {kv_heads}x{group}x{dim}"
            got = score(q_there, summary_there, launcher=place.launcher)
            near(got, score(q, summary), case, 1e-4)
            case_q, low, high, spread = (
                t.double() for t in (q, summary[:, 0], summary[:, 1], summary[:, 3])
            )
            case_q = case_q.view(kv_heads, group, 1, dim)
            low, high, spread = (t.transpose(0, 1)[:, None] for t in (low, high, spread))
            if score is quest_scores:
                plain = torch.maximum(case_q * low, case_q * high).sum(-1)
            else:
                plain = (case_q * (low + high) / 2 + case_q.abs() * spread).sum(-1)
            near(got, plain.float().view(kv_heads * group, count), f"{case}, formula", 1e-4)
            lying = _lying(place, summary, start=48)
            assert torch.equal(lying.gather().cpu(), summary)
            same(score(q_there, lying, launcher=place.launcher), got, f"{case}, where they lie")
        bound = quest_scores(q_there, summary_there, launcher=place.launcher).cpu()
        keys = pages.here.read(0, layout.plane(0).k.nbytes).view(dtype)
        keys = keys.view(count, 8, kv_heads, dim).float()
        dots = torch.einsum("hgd,pthd->hgpt", q.float().view(kv_heads, group, dim), keys)
        assert (bound.view(kv_heads, group, count) >= dots.amax(-1) - 1e-3).all(), "not a bound"


def _lying(place: Place, summary: torch.Tensor, start: int) -> PageSummaries:
    """The same summaries, at ``start`` of pages in two slabs, in another order."""
    count, each = len(summary), summary[0].nbytes
    size = (start + each + 15) // 16 * 16
    rows = torch.zeros(2, count, size, dtype=torch.uint8)
    order = torch.randperm(count).tolist()
    for page, at in enumerate(order):
        rows[page % 2, at, start : start + each] = summary[page].view(torch.uint8).view(-1)
    slabs = place.put(rows[0].view(-1), rows[1].view(-1))
    pages = [(page % 2, at * size) for page, at in enumerate(order)]
    table = PageTable(slabs, pages, page_bytes=size, page_tokens=8)
    return PageSummaries(table, start, summary.shape[2], summary.shape[3], summary.dtype)


def scores_small(place: Place) -> None:
    scores(place, [("f16", 2, 2, 40, 13)])


# ------------------------------------------------------------------------------------- mass


def masses(place: Place, cases: list[tuple[int, int]] = [(5, 70), (32, 33), (1, 1)]) -> None:  # noqa: B006
    for heads, count in cases:
        page_lse = torch.randn(heads, count) * 3
        page_lse[:, ::7] = -torch.inf
        if count == 1:
            page_lse[:] = 1.5
        lse = page_lse.logsumexp(1)
        rows = torch.randint(0, max(1, count // 2), (count,), dtype=torch.int32)
        mass = torch.rand(max(1, count // 2) + 1)
        there = place.put(page_lse, lse, rows, mass.clone())
        got = add_page_mass(*there, launcher=place.launcher)
        want = add_page_mass(page_lse, lse, rows, mass.clone())
        near(got, want, f"mass of {heads} heads and {count} pages", 1e-5)
        assert abs((got.cpu() - mass).sum().item() - 1.0) < 1e-4, "the shares do not sum to 1"


def masses_small(place: Place) -> None:
    masses(place, [(9, 40)])


# -------------------------------------------------------------------------------- attention

#: dtype, KV heads, query heads each, dim, v_dim, tokens a page, tokens of each page, splits
ATTENTION_CASES = [
    ("f32", 2, 1, 16, 16, 8, [8, 8, 3], 1),
    ("f16", 2, 3, 64, 64, 40, [40, 40, 33, 40, 1], 3),
    ("bf16", 1, 9, 40, 40, 16, [16, 16, 16, 5], None),
    ("f16", 1, 2, 20, 12, 8, [8, 7], 2),
    ("bf16", 1, 1, 256, 256, 16, [16, 2], 1),
    ("f16", 1, 2, 160, 160, 8, [8, 8, 8], 1),
    ("f32", 1, 2, 512, 512, 32, [32, 32], None),
]


def attentions(place: Place, cases: list[tuple] = ATTENTION_CASES) -> None:
    for name, kv_heads, group, dim, v_dim, page_tokens, counts, splits in cases:
        dtype = DTYPES[name]
        short = str(dtype).removeprefix("torch.")
        layer = LayerLayout("full", kv_heads, dim, short, kv_heads, v_dim, short)
        layout = PageLayout([layer] * 2, page_tokens)
        pages = Pages.make(place, layout, count=len(counts), dtype=dtype, tokens=counts)
        plane = layout.plane(1)
        for table in (pages.here, pages.there):
            spoil_unused(table, plane.k.offset, dtype, counts, kv_heads * dim)
            spoil_unused(table, plane.v.offset, dtype, counts, kv_heads * v_dim)
        q = torch.randn(kv_heads * group, dim).to(dtype)
        (q_there,) = place.put(q)
        what: dict[str, Any] = {
            "k_start": plane.k.offset,
            "v_start": plane.v.offset,
            "kv_heads": kv_heads,
            "v_dim": v_dim,
        }
        (out, lse), page_lse = partial_attention(
            q_there, pages.there, **what, splits=splits, launcher=place.launcher
        )
        want, want_page_lse = partial_attention(q, pages.here, **what)
        case = f"attention {name} {kv_heads}x{group}x{dim}"
        near(out, want.out, f"{case}, output")
        near(lse, want.lse, f"{case}, lse")
        near(page_lse, want_page_lse, f"{case}, page lse")
        near(page_lse.cpu().logsumexp(1), want.lse, f"{case}, the pages' lse together")
        plain = dense_attention(q, pages.here, what, counts, dtype)
        near(want.out, plain, f"{case}, reference")


def attentions_small(place: Place) -> None:
    attentions(place, [("f16", 1, 2, 16, 16, 4, [4, 4, 3], 2), ("bf16", 1, 1, 6, 10, 4, [4, 1], 1)])


def spoil_unused(
    table: PageTable, start: int, dtype: torch.dtype, counts: list[int], channels: int
) -> None:
    """Fill what lies behind the tokens of each page with NaN: it must not be read."""
    row = channels * dtype.itemsize
    for (number, at), count in zip(table.pages, counts, strict=True):
        begin, end = at + start + count * row, at + start + table.page_tokens * row
        table.slabs[number][begin:end] = 0xFF


def dense_attention(
    q: torch.Tensor, table: PageTable, what: dict, counts: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """The textbook softmax over all tokens, in float64."""
    kv_heads, (heads, dim) = what["kv_heads"], q.shape
    parts = []
    for start, width in ((what["k_start"], dim), (what["v_start"], what["v_dim"])):
        raw = table.read(start, table.page_tokens * kv_heads * width * dtype.itemsize).view(dtype)
        rows = raw.view(len(table), table.page_tokens, kv_heads, width)
        parts.append(torch.cat([rows[n, :count] for n, count in enumerate(counts)]).double())
    k, v = parts
    scores = torch.einsum("hgd,thd->hgt", q.double().view(kv_heads, -1, dim), k) / dim**0.5
    out = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v)
    return out.reshape(heads, what["v_dim"]).float()


def merges(place: Place) -> None:
    for parts, heads, dim in ((1, 3, 5), (4, 2, 64), (3, 1, 300)):
        outs, lses = torch.randn(parts, heads, dim), torch.randn(parts, heads) * 5
        if parts > 1:
            outs[1], lses[1] = torch.nan, -torch.inf  # a part without tokens is not read
        if parts == 3:
            lses[:, 0] = -torch.inf
        there = place.put(outs, lses)
        got = merge_partials(*there, launcher=place.launcher)
        want = merge_partials(outs, lses)
        near(got.out, want.out, f"merge of {parts}, output")
        near(got.lse, want.lse, f"merge of {parts}, lse")
        again = merge(
            [Partial(*pair) for pair in zip(*there, strict=True)], launcher=place.launcher
        )
        same(again.out, got.out.cpu(), "merge of separate parts")


# ----------------------------------------------------------------------------- quantisation

QUANTISE_CASES = [
    ("f32", 2, 5, 24, 12),
    ("f16", 3, 16, 64, 32),
    ("bf16", 2, 7, 70, 70),
    ("bf16", 1, 1, 2, 2),
]


def quantisation(
    place: Place, cases: list[tuple[str, int, int, int, int]] = QUANTISE_CASES
) -> None:
    for name, pages, tokens, channels, group in cases:
        dtype = DTYPES[name]
        x = (torch.randn(pages, tokens, channels) * torch.rand(channels) * 4).to(dtype)
        x[-1, :, -2:] = 0
        x[0, 0, 0] = 3e-5
        (x_there,) = place.put(x)
        for format in FORMATS:
            for kind in ("keys", "values"):
                case = f"{format} {kind} of {name} {pages}x{tokens}x{channels}"
                if kind == "keys":
                    got = quantise_keys(x_there, format, launcher=place.launcher)
                    want = quantise_keys(x, format)
                else:
                    got = quantise_values(x_there, format, group=group, launcher=place.launcher)
                    want = quantise_values(x, format, group=group)
                same(got.codes, want.codes, f"{case}: codes")
                same(got.scale, want.scale, f"{case}: scales")
                same(got.zero, want.zero, f"{case}: zeros")
                same(got.worst, want.worst, f"{case}: largest error")
                near(got.sums, want.sums, f"{case}: sums of squares", 1e-4)
                back = dequantise(got, dtype, launcher=place.launcher)
                same(back, dequantise(want, dtype), f"{case}: dequantised")
                error = (x.float() - back.cpu().float()).abs()
                same(got.worst, error.flatten(1).amax(1), f"{case}: largest error, measured")


def quantisation_small(place: Place) -> None:
    quantisation(place, [("f16", 2, 3, 8, 4)])


def casts(place: Place) -> None:
    """Conversions between float32 and the small formats, over every value or the awkward ones."""
    half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    half = half[half.isfinite() & (half.abs() <= 448)]
    awkward = torch.tensor(
        [448.0, 447.9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-6, 15.5 * 2.0**-10, 1e-30]
    )
    spread = torch.randn(20_000) * torch.exp(torch.randn(20_000) * 3)
    for values in (half, torch.cat([awkward, -awkward, spread.clamp(-448, 448)])):
        # 448 in every group makes its scale exactly 1, so that codes are plain conversions.
        groups = values[: len(values) // 6 * 6].view(-1, 6)
        x = torch.cat([groups, groups.new_tensor([448.0, -448.0]).expand(len(groups), 2)], 1)[None]
        x = x.contiguous()
        (x_there,) = place.put(x)
        got = quantise_values(x_there, "fp8", group=8, launcher=place.launcher)
        same(got.codes, x.to(torch.float8_e4m3fn).view(torch.uint8), "e4m3 of every value")

    bits = torch.randint(-(2**31), 2**31, (20_000,), dtype=torch.int64).to(torch.int32)
    scales = torch.cat([bits.view(torch.float32), half.float(), spread])
    scales = scales[: len(scales) // 2 * 2]
    ones = torch.ones(1, 1, len(scales), dtype=torch.uint8)
    like = quantise_keys(torch.zeros(1, 1, 2), "int8")
    codes_there, scales_there, nothing = place.put(ones, scales[None], like.zero)
    stored = replace(like, codes=codes_there, scale=scales_there, zero=nothing)
    for dtype in DTYPES.values():
        back = dequantise(stored, dtype, launcher=place.launcher)
        same(back[0, 0], scales.to(dtype), f"float32 to {dtype}")
    codes = torch.arange(256, dtype=torch.uint8)[None, None]
    codes_there, scales_there = place.put(codes, torch.ones(1, 256))
    stored = replace(stored, codes=codes_there, scale=scales_there, format="fp8")
    back = dequantise(stored, torch.float32, launcher=place.launcher)
    same(back[0, 0], codes[0, 0].view(torch.float8_e4m3fn).float(), "float32 of every e4m3 code")


BODIES: dict[str, Callable[[Place], None]] = {
    "moves": moves,
    "pieces": pieces,
    "summaries": summaries,
    "scores": scores,
    "masses": masses,
    "attentions": attentions,
    "merges": merges,
    "quantisation": quantisation,
    "casts": casts,
}

#: Inputs that a sanitizer gets through in a fraction of a second.
SANITIZED_BODIES: dict[str, Callable[[Place], None]] = {
    "moves": moves_small,
    "pieces": pieces_small,
    "summaries": summaries_small,
    "scores": scores_small,
    "masses": masses_small,
    "attentions": attentions_small,
    "merges": merges,
    "quantisation": quantisation_small,
}

#: What mutants are run with.
SMALL_BODIES = {**SANITIZED_BODIES, "casts": casts}
