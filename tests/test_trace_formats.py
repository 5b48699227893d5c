"""Trace files of every format: what is read, what is refused, and that rubbish never ends in a traceback."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError, TraceError
from kvtier.trace.merge import merge_blocks
from kvtier.trace.read import FORMATS, read_trace
from kvtier.trace.trace import ADD, REMOVE, REQUEST, Trace

DATA = Path(__file__).parent / "data" / "traces"


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def mooncake(time_ms: float, *ids: int | str, tokens: int = 0, **more: object) -> dict[str, object]:
    return {
        "timestamp": time_ms, "input_length": tokens or 512 * len(ids), "output_length": 7,
        "hash_ids": list(ids), **more,
    }  # fmt: skip


def entries(trace: Trace) -> list[list[int]]:
    return list(trace.entries())


@pytest.fixture
def file(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


# ---------------------------------------------------------------------- what is read


def test_mooncake_plain_and_gzip_are_told_by_content(file: Any) -> None:
    content = lines(mooncake(1000, 5, 6, 7), mooncake(3500, 5, 6, 9, tokens=1030))
    for data in (content, gzip.compress(content)):
        trace = read_trace(file(data))
        assert (trace.format, trace.page_tokens, trace.requests) == ("mooncake", 512, 2)
        assert entries(trace) == [[0, 1, 2], [0, 1, 3]]
        assert list(trace.times) == [0.0, 2.5]
        assert list(trace.tokens) == [1536, 1030]
        assert list(trace.parents) == [-1, 0, 1, 1]
        assert list(trace.depths) == [0, 1, 2, 2]
        assert (trace.block_refs, trace.unique_pages) == (6, 4)


def test_the_shipped_traces_have_the_sizes_that_are_published() -> None:
    sizes = {
        "mooncake_conv_head1000": (1000, 27305, 21514, 512),
        "mooncake_synth_head800": (800, 18882, 16156, 512),
        "agent_miniswe_c64": (402, 150968, 9493, 16),
    }
    for name, expected in sizes.items():
        trace = read_trace(DATA / f"{name}.jsonl.gz")
        found = (trace.requests, trace.block_refs, trace.unique_pages, trace.page_tokens)
        assert found == expected
        assert not trace.notes


@pytest.mark.parametrize(
    ("pairs", "tokens"),
    [
        ([(512, 1), (1024, 2), (700, 2)], 512),  # exact, and only one power of two fits
        ([(48, 3), (33, 3)], 16),
        ([(1000, 2), (999, 2)], 512),
        (
            [(1100, 2), (2300, 4), (500, 1), (2400, 4)],
            600,
        ),  # no power of two fits: the smallest that does
        ([(5126, 10), (2563, 5)], 512),  # full blocks only
        ([(5126, 10), (2563, 5), (700, 4)], 442),  # nothing fits: the mean
        ([(5126, 10), (51200, 100), (500, 1), (1030, 1)], 512),  # or what is beside it
        ([(5, 0)], 1),
    ],
)
def test_the_block_size_is_inferred_from_the_lengths(
    pairs: list[tuple[int, int]], tokens: int, file: Any
) -> None:
    records = [mooncake(0, *range(blocks), tokens=length) for length, blocks in pairs]
    assert read_trace(file(lines(*records))).page_tokens == tokens
    assert read_trace(file(lines(*records)), page_tokens=9).page_tokens == 9


def test_bailian_sessions_follow_the_chats(file: Any) -> None:
    def turn(time_s: float, chat: int, parent: int, *ids: int) -> dict[str, object]:
        return mooncake(time_s, *ids, tokens=16 * len(ids), chat_id=chat, parent_chat_id=parent)

    trace = read_trace(file(lines(turn(1, 7, -1, 1), turn(2, 8, -1, 2), turn(3, 9, 7, 1, 3))))
    assert trace.format == "bailian"
    assert list(trace.times) == [0.0, 1.0, 2.0]
    assert list(trace.sessions) == [0, 1, 0]


def test_csv_with_and_without_a_header(file: Any) -> None:
    plain = read_trace(file(b"0.5,a,100\n1.5,b,30\n2,a,100\n"))
    named = read_trace(file(b"size,key,time\n100,a,0.5\n30,b,1.5\n100,a,2\n"))
    for trace in (plain, named):
        assert trace.format == "csv"
        assert entries(trace) == [[0], [1], [0]]
        assert trace.sizes is not None
        assert list(trace.sizes) == [100, 30]
        assert list(trace.times) == [0.0, 1.0, 1.5]
        assert list(trace.parents) == [-1, -1]


def session(
    name: str, scope: str | None, *requests: dict[str, Any], block: int = 64
) -> dict[str, Any]:
    record = {"id": name, "block_size": block, "requests": list(requests)}
    return record if scope is None else record | {"hash_id_scope": scope}


def turn(t: float, *ids: int) -> dict[str, Any]:
    return {"t": t, "type": "s", "in": 64 * len(ids) + 3, "out": 5, "hash_ids": list(ids)}


def test_sessions_from_a_file_from_lines_and_from_a_folder(file: Any, tmp_path: Path) -> None:
    one = session("a", None, turn(0, 1, 2), turn(70, 1, 2, 3))
    two = session("b", None, turn(0, 1, 2))
    single = read_trace(file(json.dumps(one, indent=1).encode(), "one.json"))
    assert single.format == "kv-cache-tester"
    assert (single.page_tokens, entries(single)) == (64, [[0, 1], [0, 1, 2]])
    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / "t1.json").write_text(json.dumps(one))
    (folder / "t2.json.gz").write_bytes(gzip.compress(json.dumps(two).encode()))
    for path in (file(lines(one, two), "many.jsonl"), folder):
        trace = read_trace(path)
        # By time: the second session begins 60 s after the first. Its ids are its own.
        assert entries(trace) == [[0, 1], [2, 3], [0, 1, 4]]
        assert list(trace.times) == [0.0, 60.0, 70.0]
        assert list(trace.sessions) == [0, 1, 0]
    assert list(read_trace(folder, session_gap_s=5).times) == [0.0, 5.0, 70.0]


def test_global_ids_are_shared_and_subagents_are_sessions(file: Any) -> None:
    inner = {"t": 4, "type": "subagent", "requests": [turn(5, 1, 9)]}
    trace = read_trace(
        file(
            lines(
                session("a", "global", turn(0, 1, 2), inner), session("b", "global", turn(0, 1, 2))
            )
        )
    )
    assert entries(trace) == [[0, 1], [0, 2], [0, 1]]
    assert len(set(trace.sessions)) == 3


def stored(parent: Any, *hashes: Any, medium: str | None = "GPU", block: int = 16) -> list[Any]:
    return ["BlockStored", list(hashes), parent, [1] * block * len(hashes), block, None, medium]


def test_vllm_events_become_requests(file: Any) -> None:
    batches = [
        [10.0, [stored(None, 1, 2)], 0],
        [10.2, [stored(2, 3)], 0],  # the next chunk of the same request
        [10.3, [stored(None, 77, medium="CPU")], 0],  # another tier
        [14.0, [stored(3, 4), ["BlockRemoved", [1], "GPU"]], 0],  # the next turn
        [15.0, [stored(2, 8)], 0],  # branches off
        {"ts": 16.0, "events": [{"type": "AllBlocksCleared"}]},
        {"ts": 17.0, "events": [{"type": "BlockStored", "block_hashes": ["x"], "block_size": 16}]},
        [18.0, [stored(999, 5)]],  # its parent was stored before the file begins
    ]
    trace = read_trace(file(lines(*batches)))
    assert trace.format == "vllm"
    assert trace.page_tokens == 16
    assert entries(trace) == [
        [0, 1], [2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 2, 3, 4], [5], [6],
    ]  # fmt: skip
    assert list(trace.kinds) == [REQUEST, ADD, REQUEST, REQUEST, REMOVE, REQUEST, REQUEST]
    assert list(trace.parents)[:5] == [-1, 0, 1, 2, 1]
    assert any("hit ratios come out low" in note for note in trace.notes)
    assert any("1 blocks follow one" in note for note in trace.notes)


def pack(value: Any) -> bytes:
    """Msgpack, written apart from the reader."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        if 0 <= value < 128:
            return bytes([value])
        if -32 <= value < 0:
            return struct.pack("b", value)
        return (
            b"\xcf" + struct.pack(">Q", value) if value > 0 else b"\xd3" + struct.pack(">q", value)
        )
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return b"\xc4" + bytes([len(value)]) + value
    if isinstance(value, str):
        data = value.encode()
        head = bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])
        return head + data
    if isinstance(value, list):
        head = (
            bytes([0x90 | len(value)])
            if len(value) < 16
            else b"\xdc" + struct.pack(">H", len(value))
        )
        return head + b"".join(map(pack, value))
    return bytes([0x80 | len(value)]) + b"".join(pack(k) + pack(v) for k, v in value.items())


def test_msgpack_payloads_are_the_same_trace_as_json(file: Any) -> None:
    batches: list[Any] = [
        [10.0, [stored(None, b"a" * 32, b"b" * 32)], 0],
        [14.0, [stored(b"b" * 32, 2**63 + 5, -7)], 0],
        {"ts": 15.0, "events": [["AllBlocksCleared"]]},
    ]
    packed = read_trace(file(b"".join(map(pack, batches))))
    assert packed.format == "vllm"
    assert entries(packed) == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert list(packed.kinds) == [REQUEST, REQUEST, REMOVE]


HEADER = {"kvtier_trace": 1, "page_tokens": 32, "page_bytes": 4096}


def test_our_own_format(file: Any) -> None:
    trace = read_trace(
        file(
            lines(
                HEADER,
                {"kind": "request", "t": 0, "pages": [[0, 3]], "at": 0, "new": ["a", "b", "c"],
                 "tokens": 100, "session": "s", "hints": {"priority": 2, "ttl_s": 9.5}},
                {"kind": "add", "t": 1, "pages": [[3, 1]], "at": 3, "new": ["d"], "after": 2},
                {"kind": "op", "t": 1, "link": "host->vram", "bytes": 1, "queue_s": 0, "copy_s": 0},
                {"kind": "keys", "t": 2},
                {"kind": "request", "t": 2, "pages": [[0, 1], [1, 1]], "at": 0, "new": ["a", "x"]},
                {"kind": "remove", "t": 3, "pages": [[1, 1]]},
                {"kind": "dropped", "t": 3, "records": 4},
                {"kind": "session_end", "t": 4, "pages": [[0, 1]], "session": "s"},
                {"kind": "end", "t": 4, "records": 5},
            )
        )
    )  # fmt: skip
    assert (trace.format, trace.page_tokens, trace.page_bytes) == ("kvtier", 32, 4096)
    assert entries(trace) == [[0, 1, 2], [3], [0, 4], [4], [0]]
    assert list(trace.kinds) == [0, 1, 0, 2, 3]
    assert list(trace.parents) == [-1, 0, 1, 2, 0]
    assert trace.hints[0].priority == 2
    assert trace.hints[0].ttl_s == 9.5
    assert any("4 records were dropped" in note for note in trace.notes)


def test_a_recording_that_was_cut_off_is_good_up_to_its_last_whole_line(file: Any) -> None:
    whole = lines(HEADER, {"t": 0, "pages": [[0, 1]], "at": 0, "new": ["a"]})
    trace = read_trace(file(whole + b'{"t": 1, "pag'))
    assert entries(trace) == [[0]]
    assert any("cut off" in note for note in trace.notes)


# ---------------------------------------------------------------------- what is refused

GOOD = mooncake(5, 1, 2)
BAD: list[tuple[str, bytes, int, str]] = [
    ("mooncake", lines(GOOD) + b"{nonsense}\n", 2, "not JSON"),
    ("mooncake", lines(GOOD, {"timestamp": 6}), 2, "hash_ids is missing"),
    ("mooncake", lines(GOOD, mooncake(4, 1)), 2, "time goes back"),
    ("mooncake", lines(GOOD, mooncake(6) | {"hash_ids": 7}), 2, "not a list"),
    ("mooncake", lines(GOOD, mooncake(6) | {"hash_ids": [1.5]}), 2, "neither a whole number nor"),
    ("mooncake", lines(GOOD, mooncake(6) | {"hash_ids": [True]}), 2, "neither a whole number nor"),
    ("mooncake", lines(GOOD, mooncake(6) | {"input_length": -3}), 2, "must be from 0"),
    ("mooncake", lines(GOOD, mooncake(6) | {"timestamp": "6"}), 2, "not a number"),
    ("mooncake", lines(GOOD) + b'{"timestamp": NaN, "hash_ids": []}\n', 2, "finite"),
    ("mooncake", lines(GOOD) + b'{"timestamp": 1e999, "hash_ids": []}\n', 2, "finite"),
    ("mooncake", lines(GOOD) + b"[]\n", 2, "not a JSON object"),
    ("mooncake", lines(GOOD) + b"\xff\xfe{}\n", 2, "not"),
    ("mooncake", lines(GOOD) + b"[" * 100_000 + b"\n", 2, "not JSON"),
    ("csv", b"1,a,3\n2,b\n", 2, "2 columns"),
    ("csv", b"1,a,3\n2,b,x\n", 2, "size is 'x'"),
    ("csv", b"1,a,3\n0.5,b,3\n", 2, "time goes back"),
    ("csv", b"1,a,3\n2,,3\n", 2, "the key is empty"),
    ("csv", b"1,a,3\n2,b,-1\n", 2, "must be from 0"),
    ("kvtier", lines(HEADER, {"t": 1, "pages": [[0, 1]]}), 2, "not all defined"),
    ("kvtier", lines(HEADER, {"t": 1, "pages": [[0, 1]], "at": 5, "new": ["a"]}), 2, "leave a gap"),
    (
        "kvtier",
        lines(
            HEADER,
            {"t": 1, "pages": [[0, 2]], "at": 0, "new": ["a", "b"]},
            {"t": 1, "pages": [[0, 1]], "at": 1, "new": ["c"]},
        ),
        3,
        "page numbers go back",
    ),
    ("kvtier", lines(HEADER, {"t": 1, "kind": "dance", "pages": []}), 2, "kind is 'dance'"),
    ("kvtier", lines(HEADER, {"t": 1, "pages": [[0, 10**12]]}), 2, "not all defined"),
    ("kvtier", lines({"kvtier_trace": 2}), 1, "reads version 1"),
    (
        "kv-cache-tester",
        lines(session("a", None, turn(3, 1), turn(2, 1))),
        1,
        "request 2: time goes",
    ),
    ("kv-cache-tester", lines({"requests": [], "block_size": 0}), 1, "block_size is 0"),
    ("vllm-json", lines([1.0, [stored(None, 1)]], [2.0, [["BlockEaten", []]]]), 2, "is no event"),
    ("vllm-json", lines([1.0, [stored(None, 1)]], [0.5, []]), 2, "time goes back"),
    ("vllm-msgpack", pack([1.0, [stored(None, 1)]]) + b"\x93\xcb\x00", 2, "the data ends"),
    ("vllm-msgpack", pack([1.0, [stored(None, 1)]]) + b"\xdd\xff\xff\xff\xff", 2, "the data ends"),
]


@pytest.mark.parametrize(("format", "content", "line", "reason"), BAD)
def test_a_bad_record_is_named_by_file_line_and_reason(
    format: str, content: bytes, line: int, reason: str, file: Any
) -> None:
    path = file(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, format=format)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert reason in str(caught.value)


def test_bad_records_are_skipped_and_counted_up_to_a_limit(file: Any) -> None:
    path = file(lines(GOOD) + b"x\n" + lines(mooncake(1, 3)) + lines(mooncake(6, 3)))
    trace = read_trace(path, skip_bad=2)
    assert (trace.requests, trace.skipped) == (2, 2)
    assert any("2 bad records were skipped" in note for note in trace.notes)
    with pytest.raises(TraceError, match=r":3: time goes back.*the 2th bad record"):
        read_trace(path, skip_bad=1)


def test_what_a_skipped_line_defined_is_missing_further_down(file: Any) -> None:
    first = {"t": 1, "pages": [[0, 1]], "at": 0, "new": [3]}
    second = {"t": 2, "pages": [[0, 2]], "at": 1, "new": ["b"]}
    third = {"t": 3, "pages": [[0, 1]], "at": 0, "new": ["c"]}
    trace = read_trace(file(lines(HEADER, first, second, third)), skip_bad=2)
    assert (entries(trace), trace.skipped) == ([[0]], 2)


def test_the_keys_of_a_bad_line_do_not_count(file: Any) -> None:
    good = {"t": 1, "pages": [[0, 1]], "at": 0, "new": ["a"]}
    bad = {"t": 2, "pages": [[0, 9]], "at": 1, "new": ["b"]}
    next_one = {"t": 3, "pages": [[0, 2]], "at": 1, "new": ["c"]}
    trace = read_trace(file(lines(HEADER, good, bad, next_one)), skip_bad=1)
    assert (entries(trace), trace.unique_pages) == ([[0], [0, 1]], 2)


@pytest.mark.parametrize("cut", [3, 30, 60])
def test_a_truncated_gzip_says_where(cut: int, file: Any) -> None:
    content = lines(*(mooncake(n, n, n + 1) for n in range(50)))
    data = gzip.compress(content, mtime=0)
    path = file(data[:-cut] if cut < 60 else data[: len(data) // 2])
    with pytest.raises(TraceError, match=r":\d+: the gzip data is (cut off|damaged)"):
        read_trace(path, format="mooncake")
    if cut < 20:
        assert read_trace(path, format="mooncake", skip_bad=1).requests == 50


def test_damaged_gzip_data(file: Any) -> None:
    data = bytearray(gzip.compress(lines(*(mooncake(n, n, 7 * n) for n in range(900))), mtime=0))
    data[-6] ^= 0xFF  # the checksum at its end
    path = file(bytes(data))
    with pytest.raises(TraceError, match=r":\d+: the gzip data is damaged here"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"", mtime=0)])
def test_an_empty_file(content: bytes, file: Any) -> None:
    with pytest.raises(TraceError, match=r":1: "):
        read_trace(file(content))
    for format in FORMATS:
        with pytest.raises(TraceError):
            read_trace(file(content), format=format)


def test_files_and_formats_that_are_not_there(file: Any, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="the format 'tar' is unknown"):
        read_trace(file(lines(GOOD)), format="tar")
    with pytest.raises(TraceError, match="no known trace format"):
        read_trace(file(b"Dear diary,\n"))
    with pytest.raises(TraceError, match=r"no \*.json"):
        read_trace(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["timestamp", "hash_ids", "input_length", "t", "pages", "new", "at", "kind", "after", "hints",
     "session", "requests", "block_size", "ts", "events", "type", "block_hashes", "chat_id", "in"]
)  # fmt: skip
VALUES = (
    JSON
    | st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3)
    | st.sampled_from(
        ["request", "add", "remove", "keys", "op", "dropped", "subagent", "BlockStored"]
    )
)
RECORDS = st.dictionaries(FIELDS, VALUES, max_size=6)
PLAUSIBLE = st.lists(RECORDS | JSON, max_size=6).map(lambda rs: lines(*rs))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    content=st.binary(max_size=80)
    | PLAUSIBLE
    | PLAUSIBLE.map(lambda data: lines(HEADER) + data)
    | PLAUSIBLE.map(partial(gzip.compress, mtime=0)).flatmap(
        lambda d: st.integers(0, len(d)).map(lambda n: d[:n])
    )
    | JSON.map(lambda v: pack([1.0, [["BlockStored", [1], None, [], 16]]]) + repr(v).encode()),
    format=st.sampled_from(["auto", *FORMATS]),
    skip_bad=st.sampled_from([0, 3, 100]),
)
def test_rubbish_gives_a_trace_or_one_clear_error(
    content: bytes, format: str, skip_bad: int, tmp_path: Path
) -> None:
    path = tmp_path / "rubbish"
    path.write_bytes(content)
    try:
        trace = read_trace(path, format=format, skip_bad=skip_bad)
    except TraceError as error:
        trace, told = None, str(error)
    if trace is None:
        assert str(path) in told
        return
    assert len(trace.starts) == len(trace) + 1
    assert all(0 <= page < trace.unique_pages for page in trace.pages)
    assert all(a <= b for a, b in zip(trace.times, trace.times[1:], strict=False))
    assert all(parent < page for page, parent in enumerate(trace.parents))


# ---------------------------------------------------------------------- larger blocks


def test_merged_blocks_are_those_of_the_longer_pages(file: Any) -> None:
    trace = read_trace(
        file(lines(mooncake(0, 1, 2, 3, 4, 5), mooncake(1, 1, 2, 3, 4), mooncake(2, 1, 2, 9, 10)))
    )
    merged = merge_blocks(trace, 1024)
    assert merged.page_tokens == 1024
    assert entries(merged) == [[0, 1], [0, 1], [0, 2]]
    assert list(merged.tokens) == list(trace.tokens)
    assert any("1 requests do not fill their last block" in note for note in merged.notes)
    assert merge_blocks(trace, 512) is trace
    with pytest.raises(ConfigError, match="give a multiple of 512"):
        merge_blocks(trace, 700)


def test_additions_and_removals_merge_too(file: Any) -> None:
    trace = read_trace(
        file(
            lines(
                HEADER,
                {"t": 0, "pages": [[0, 2]], "at": 0, "new": ["a", "b"]},
                {"t": 1, "kind": "add", "pages": [[2, 2]], "at": 2, "new": ["c", "d"], "after": 1},
                {"t": 2, "pages": [[0, 4]]},
                {"t": 3, "kind": "remove", "pages": [[3, 1]]},
            )
        )
    )
    merged = merge_blocks(trace, 64)
    assert entries(merged) == [[0], [1], [0, 1], [1]]
    assert list(merged.kinds) == [REQUEST, ADD, REQUEST, REMOVE]
    assert list(merged.parents) == [-1, 0]
    assert merged.page_bytes == 8192
