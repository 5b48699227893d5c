"""The emulated device: races, virtual time, limits and faults."""

import gc
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.devices.base import Event, Range
from kvtier.devices.cards import LinkModel, find_card
from kvtier.devices.emulated import EmulatedDevice
from kvtier.devices.faults import Faults
from kvtier.devices.races import Access, AccessLog
from kvtier.errors import (
    ConfigError,
    CopyFailedError,
    DeadlineExceededError,
    DeadlockError,
    DeviceOOMError,
    OffloadWarning,
    RaceError,
)

MiB = 2**20


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice(vram_bytes=64 * MiB)
    yield opened
    opened.close()


def poisoned(values: torch.Tensor) -> bool:
    return bool((values == 0xFF).all())


# Races: every planted one is found, and its correct twin is not.


def host_reads_before_the_copy_ends(d: EmulatedDevice, correct: bool) -> None:
    host, vram, down = d.alloc_host(MiB), d.alloc(MiB), d.stream("d2h")
    d.copy(down, [(host.range(), vram.range())])
    if correct:
        down.record().synchronize(1)
    d.host(host.range())


def host_reads_though_time_has_passed(d: EmulatedDevice, correct: bool) -> None:
    host, vram, down = d.alloc_host(MiB), d.alloc(MiB), d.stream("d2h")
    d.copy(down, [(host.range(), vram.range())])
    event = down.record()
    d.host_work(1.0)
    if correct:
        assert event.done()
    d.host(host.range(5, 6))


def attention_before_the_page_is_up(d: EmulatedDevice, correct: bool) -> None:
    host, vram, up = d.alloc_host(MiB), d.alloc(MiB), d.stream("h2d")
    d.copy(up, [(vram.range(), host.range())])
    if correct:
        d.compute_stream().wait(up.record())
    d.use(d.compute_stream(), "attention", reads=[vram.range(100, 200)])


def attention_without_event_though_time_has_passed(d: EmulatedDevice, correct: bool) -> None:
    host, vram, up = d.alloc_host(MiB), d.alloc(MiB), d.stream("h2d")
    d.copy(up, [(vram.range(), host.range())])
    event = up.record()
    d.host_work(1.0)
    if correct:
        event.synchronize(1)
    d.use(d.compute_stream(), "attention", reads=[vram.range(100, 200)])


def wait_on_an_event_recorded_too_early(d: EmulatedDevice, correct: bool) -> None:
    host, vram, up = d.alloc_host(MiB), d.alloc(MiB), d.stream("h2d")
    event = up.record()
    d.copy(up, [(vram.range(), host.range())])
    d.compute_stream().wait(up.record() if correct else event)
    d.launch(d.compute_stream(), "read", lambda: None, reads=[vram.range()])


def free_while_a_copy_is_in_flight(d: EmulatedDevice, correct: bool) -> None:
    host, vram, up = d.alloc_host(MiB), d.alloc(MiB), d.stream("h2d")
    d.copy(up, [(vram.range(), host.range())])
    if correct:
        up.synchronize(1)
    d.free(vram)


def pinned_source_reused_too_early(d: EmulatedDevice, correct: bool) -> None:
    host, vram, up = d.alloc_host(MiB), d.alloc(MiB), d.stream("h2d")
    d.copy(up, [(vram.range(), host.range())])
    if correct:
        up.synchronize(1)
    d.host(host.range(MiB - 1, MiB), write=True)


def read_after_write(d: EmulatedDevice, correct: bool) -> None:
    vram, one, two = d.alloc(MiB), d.stream("one"), d.stream("two")
    d.launch(one, "write", lambda: None, writes=[vram.range(0, 512)])
    if correct:
        two.wait(one.record())
    d.launch(two, "read", lambda: None, reads=[vram.range(511, 600)])


def write_after_read(d: EmulatedDevice, correct: bool) -> None:
    vram, one, two = d.alloc(MiB), d.stream("one"), d.stream("two")
    d.launch(one, "read", lambda: None, reads=[vram.range(0, 512)])
    if correct:
        two.wait(one.record())
    d.launch(two, "write", lambda: None, writes=[vram.range(511, 600)])


def write_after_write(d: EmulatedDevice, correct: bool) -> None:
    vram, one, two = d.alloc(MiB), d.stream("one"), d.stream("two")
    d.use(one, "write", writes=[vram.range(0, 512)])
    if correct:
        two.wait(one.record())
    d.use(two, "write", writes=[vram.range(511, 600)])


def second_reader_without_event(d: EmulatedDevice, correct: bool) -> None:
    """The first reader's event orders the first reader alone."""
    vram, one, two, three = d.alloc(MiB), d.stream("one"), d.stream("two"), d.stream("three")
    d.launch(one, "write", lambda: None, writes=[vram.range()])
    event = one.record()
    two.wait(event)
    d.launch(two, "read", lambda: None, reads=[vram.range()])
    if correct:
        three.wait(event)
    d.launch(three, "read", lambda: None, reads=[vram.range(7, 9)])


def write_after_only_one_of_two_readers(d: EmulatedDevice, correct: bool) -> None:
    vram, one, two, three = d.alloc(MiB), d.stream("one"), d.stream("two"), d.stream("three")
    for reader in (one, two):
        d.launch(reader, "read", lambda: None, reads=[vram.range()])
    three.wait(two.record())
    if correct:
        three.wait(one.record())
    d.launch(three, "write", lambda: None, writes=[vram.range(7, 9)])


def torch_work_is_not_waited_for_by_announcing_it(d: EmulatedDevice, correct: bool) -> None:
    """``use`` puts the bytes in place for the caller, which orders nothing else."""
    host, vram, up = d.alloc_host(MiB), d.alloc(MiB), d.stream("h2d")
    d.copy(up, [(vram.range(), host.range())])
    d.compute_stream().wait(up.record())
    d.use(d.compute_stream(), "attention", reads=[vram.range()])
    if correct:
        d.compute_stream().synchronize(1)
    d.host(host.range(), write=True)


def parts_of_one_copy_overlap(d: EmulatedDevice, correct: bool) -> None:
    host, vram = d.alloc_host(100), d.alloc(100)
    at = 50 if correct else 49
    d.copy(
        d.stream("h2d"),
        [(vram.range(0, 50), host.range(50, 100)), (vram.range(at, at + 50), host.range(0, 50))],
    )


def vram_copy_onto_its_own_source(d: EmulatedDevice, correct: bool) -> None:
    vram = d.alloc(100)
    at = 50 if correct else 49
    d.copy(d.stream("x"), [(vram.range(at, at + 50), vram.range(0, 50))])


RACES: list[Callable[[EmulatedDevice, bool], None]] = [
    host_reads_before_the_copy_ends,
    host_reads_though_time_has_passed,
    attention_before_the_page_is_up,
    attention_without_event_though_time_has_passed,
    wait_on_an_event_recorded_too_early,
    free_while_a_copy_is_in_flight,
    pinned_source_reused_too_early,
    read_after_write,
    write_after_read,
    write_after_write,
    second_reader_without_event,
    write_after_only_one_of_two_readers,
    torch_work_is_not_waited_for_by_announcing_it,
    parts_of_one_copy_overlap,
    vram_copy_onto_its_own_source,
]


@pytest.mark.parametrize("program", RACES, ids=lambda f: f.__name__)
def test_planted_races_are_found(device: EmulatedDevice, program) -> None:
    program(device, True)
    with pytest.raises(RaceError):
        program(EmulatedDevice(vram_bytes=64 * MiB), False)
    program(EmulatedDevice(vram_bytes=64 * MiB, check_races=False), False)


def test_a_race_names_both_operations(device: EmulatedDevice) -> None:
    vram, host = device.alloc(4096), device.alloc_host(4096)
    device.copy(device.stream("h2d"), [(vram.range(0, 10), host.range(0, 10))])
    with pytest.raises(RaceError, match=r"'attention'.*'compute'.*copy 'h2d'.*stream 'h2d'"):
        device.use(device.compute_stream(), "attention", reads=[vram.range(9, 12)])


@pytest.mark.parametrize("check_races", [True, False])
def test_freed_memory_is_gone_and_poisoned(check_races: bool) -> None:
    device = EmulatedDevice(check_races=check_races)
    vram = device.alloc(MiB)
    view = vram.raw()[:8]
    storage = weakref.ref(vram.raw())
    assert poisoned(vram.raw())
    vram.raw().zero_()
    device.free(vram)
    assert poisoned(view)
    assert torch.isnan(view.view(torch.float16)).all()
    del view
    gc.collect()
    assert storage() is None
    uses: list[Callable[[], object]] = [
        vram.raw,
        lambda: device.free(vram),
        lambda: device.launch(device.stream("s"), "k", lambda: None, reads=[vram.range()]),
        lambda: device.use(device.stream("s"), "k", writes=[vram.range()]),
        lambda: device.copy(device.stream("s"), [(device.alloc_host(8).range(), vram.range(0, 8))]),
    ]
    for use in uses:
        with pytest.raises(RaceError, match="after it was freed"):
            use()


# Races: the verdict equals that of a brute-force happens-before relation.


@dataclass
class Op:
    """What an operation of a random program does, and the earlier operations it waits for.

    ``agent`` -1 is the host. Ranges are (buffer, start, stop).
    """

    agent: int
    source: tuple[int, int, int] | None
    target: tuple[int, int, int] | None
    how: str
    waits: list[int] = field(default_factory=list)

    def touches(self, other: "Op") -> bool:
        pairs = [
            (self.target, other.target),
            (self.target, other.source),
            (self.source, other.target),
        ]
        return any(
            a is not None and b is not None and a[0] == b[0] and a[1] < b[2] and b[1] < a[2]
            for a, b in pairs
        )


SIZE = 40
HOST_BUFFERS, VRAM_BUFFERS, STREAMS = 2, 2, 3


@st.composite
def programs(draw: st.DrawFn, longest: int = 14) -> list[Op]:
    ops: list[Op] = []
    for _ in range(draw(st.integers(2, longest))):
        how = draw(st.sampled_from(["h2d", "d2h", "d2d", "launch", "use", "read", "write"]))
        length = draw(st.integers(1, 12))

        def place(host: bool, length: int = length) -> tuple[int, int, int]:
            count = HOST_BUFFERS if host else VRAM_BUFFERS
            start = draw(st.integers(0, SIZE - length))
            return (draw(st.integers(0, count - 1)) + (0 if host else 10), start, start + length)

        agent = draw(st.integers(0, STREAMS - 1))
        if how in ("read", "write"):
            at = place(host=True)
            ops.append(Op(-1, at if how == "read" else None, at if how == "write" else None, how))
            continue
        source, target = place(host=how == "h2d"), place(host=how == "d2h")
        if how == "d2d" and source[0] == target[0] and abs(source[1] - target[1]) < length:
            how = "launch"
        ops.append(Op(agent, source, target, how))
    return ops


def ordered_before(ops: list[Op], index: int) -> set[int]:
    """Operations ordered before ``ops[index]`` starts, by the definition: brute force."""
    before: list[set[int]] = []
    stream_tail: dict[int, set[int]] = {}
    host: set[int] = set()
    for number, op in enumerate(ops[: index + 1]):
        known = set(host) | stream_tail.get(op.agent, set())
        for earlier in op.waits:
            known |= before[earlier] | {earlier}
        if op.agent == -1:
            host |= known | {number}
        else:
            stream_tail[op.agent] = known | {number}
        before.append(known)
    return before[index]


def needed_waits(ops: list[Op]) -> list[tuple[int, int]]:
    """Fill in every wait that is needed, and nothing else; (later, earlier) of each."""
    edges = []
    for later, op in enumerate(ops):
        for earlier in reversed(range(later)):
            if ops[earlier].touches(op) and earlier not in ordered_before(ops, later):
                op.waits.append(earlier)
                edges.append((later, earlier))
    return edges


class Runner:
    """Runs a program on a device, and the same on plain tensors one operation after the other."""

    def __init__(self) -> None:
        self.device = EmulatedDevice(vram_bytes=MiB)
        self.streams = [self.device.stream(f"s{i}") for i in range(STREAMS)]
        self.buffers = {i: self.device.alloc_host(SIZE) for i in range(HOST_BUFFERS)}
        self.buffers |= {10 + i: self.device.alloc(SIZE) for i in range(VRAM_BUFFERS)}
        self.model = {i: torch.zeros(SIZE, dtype=torch.uint8) for i in self.buffers}
        for i, buffer in self.buffers.items():
            if i < 10:
                self.device.host(buffer.range(), write=True).zero_()
            else:
                self.device.use(self.streams[0], "clear", writes=[buffer.range()])
                buffer.raw().zero_()
        self.device.synchronize(1)
        self.events: list[Event | None] = []

    def range(self, at: tuple[int, int, int]) -> Range:
        return self.buffers[at[0]].range(at[1], at[2])

    def step(self, number: int, op: Op) -> None:
        for earlier in op.waits:
            event = self.events[earlier]
            if event is None:
                continue
            if op.agent == -1:
                event.synchronize(1)
            else:
                self.streams[op.agent].wait(event)
        self.perform(number, op)
        self.events.append(None if op.agent == -1 else self.streams[op.agent].record())

    def perform(self, number: int, op: Op) -> None:
        device = self.device
        if op.agent == -1:
            at = op.target or op.source
            assert at is not None
            values = device.host(self.range(at), write=op.how == "write")
            model = self.model[at[0]][at[1] : at[2]]
            if op.how == "write":
                values.fill_(number)
                model.fill_(number)
            else:
                assert torch.equal(values, model)
            return
        assert op.source is not None
        assert op.target is not None
        source, target = self.range(op.source), self.range(op.target)
        stream = self.streams[op.agent]

        def mix(to: torch.Tensor, of: torch.Tensor) -> None:
            to.copy_(of.clone() * 3 + number)

        if op.how == "launch":
            device.launch(
                stream,
                f"k{number}",
                lambda: mix(target.raw(), source.raw()),
                reads=[source],
                writes=[target],
            )
        elif op.how == "use":
            device.use(stream, f"u{number}", reads=[source], writes=[target])
            mix(target.raw(), source.raw())
        else:
            device.copy(stream, [(target, source)])
        model_source = self.model[op.source[0]][op.source[1] : op.source[2]]
        model_target = self.model[op.target[0]][op.target[1] : op.target[2]]
        if op.how in ("launch", "use"):
            mix(model_target, model_source)
        else:
            model_target.copy_(model_source.clone())

    def finish(self) -> None:
        self.device.synchronize(1)
        for i, buffer in self.buffers.items():
            assert torch.equal(buffer.raw(), self.model[i]), f"buffer {i}"


@settings(max_examples=120, deadline=None)
@given(programs())
def test_a_correct_program_never_races_and_computes_what_it_should(ops: list[Op]) -> None:
    needed_waits(ops)
    runner = Runner()
    for number, op in enumerate(ops):
        runner.step(number, op)
    runner.finish()


@settings(max_examples=120, deadline=None)
@given(programs(), st.data())
def test_dropping_any_wait_that_matters_is_found(ops: list[Op], data: st.DataObject) -> None:
    edges = needed_waits(ops)
    for later, earlier in edges:
        if data.draw(st.booleans()):
            ops[later].waits.remove(earlier)
    runner = Runner()
    for number, op in enumerate(ops):
        known = ordered_before(ops, number)
        racy = any(ops[e].touches(op) and e not in known for e in range(number))
        if racy:
            with pytest.raises(RaceError):
                runner.step(number, op)
            return
        runner.step(number, op)
    runner.finish()


@settings(max_examples=60, deadline=None)
@given(programs())
def test_the_same_program_takes_the_same_virtual_time(ops: list[Op]) -> None:
    needed_waits(ops)
    traces = []
    for _ in range(2):
        runner = Runner()
        for number, op in enumerate(ops):
            runner.step(number, op)
        runner.finish()
        traces.append((list(runner.device.trace), runner.device.now_s))
    assert traces[0] == traces[1]


def test_the_log_of_a_busy_slab_stays_short() -> None:
    """40 slots of a slab, thousands of operations: entries are superseded, not collected."""
    log = AccessLog(40 * 1000, "a slab")
    clock, host = [0, 0], [0, 0]
    for count in range(1, 4001):
        slot = count % 40 * 1000
        clock[0] = count
        log.write(slot, slot + 1000, clock, Access(0, count, "write"))
        for plane in range(4):
            at = slot + plane * 250
            log.read(at, at + 250, clock, Access(0, count, "read"), host)
    assert len(log) <= 40 * 4 + 1
    log.write(0, 40 * 1000, clock, None)
    assert len(log) == 1


# Virtual time


def test_a_copy_takes_what_the_link_allows(device: EmulatedDevice) -> None:
    host, vram, up = device.alloc_host(32 * MiB), device.alloc(32 * MiB), device.stream("h2d")
    start = device.now_s
    device.copy(up, [(vram.range(), host.range())])
    submitted = device.now_s
    up.synchronize(1)
    link = find_card("rtx-4060-ti-16gb").link_model()
    assert submitted - start == pytest.approx(link.host_s())
    assert device.now_s - submitted == pytest.approx(link.device_s("h2d", 32 * MiB), rel=1e-6)
    assert device.stats.bytes["h2d"] == 32 * MiB
    assert device.stats.copies == {"h2d": 1, "d2h": 0, "d2d": 0}


def test_bytes_arrive_when_the_copy_ends_and_not_before() -> None:
    device = EmulatedDevice(check_races=False)
    host, vram = device.alloc_host(16 * MiB), device.alloc(16 * MiB)
    device.host(host.range(), write=True).fill_(1)
    vram.raw().fill_(2)
    busy = device.stream("busy")
    device.copy(busy, [(device.alloc(16 * MiB).range(), host.range())])
    device.copy(device.stream("h2d"), [(vram.range(), host.range())])
    assert vram.raw()[0] == 2, "it waits for the engine"
    device.host_work(1.5e-3)
    assert poisoned(vram.raw()), "in flight"
    device.host_work(1.5e-3)
    assert (vram.raw() == 1).all()


def pipeline(device: EmulatedDevice, overlap: bool) -> float:
    page = 4 * MiB
    compute = device.stream("compute")
    up = device.stream("h2d") if overlap else compute
    slots = [device.alloc(page) for _ in range(2)]
    weights = device.alloc(32 * MiB)
    host = device.alloc_host(page)
    free: list[Event | None] = [None, None]
    start = device.now_s
    for step in range(8):
        slot = step % 2
        event = free[slot]
        if event is not None:
            up.wait(event)
        device.copy(up, [(slots[slot].range(), host.range())])
        compute.wait(up.record())
        device.launch(
            compute, "layer", lambda: None, reads=[slots[slot].range(), *[weights.range()] * 3]
        )
        free[slot] = compute.record()
    device.synchronize(1)
    return device.now_s - start


def test_copies_and_compute_overlap() -> None:
    card = find_card("rtx-4060-ti-16gb")
    kernel_s = (4 + 32) * MiB / card.memory_bandwidth
    copy_s = card.link_model().device_s("h2d", 4 * MiB)
    serial = pipeline(EmulatedDevice(), overlap=False)
    overlapped = pipeline(EmulatedDevice(), overlap=True)
    assert serial == pytest.approx(8 * (copy_s + kernel_s), rel=0.1)
    assert overlapped == pytest.approx(8 * copy_s + kernel_s, rel=0.1)


def test_one_engine_a_direction_and_both_directions_share_the_link() -> None:
    link = LinkModel(h2d=1e9, d2h=1e9, start_s=0, per_piece_s=0, duplex=0.8)

    def seconds(*directions: str) -> float:
        device = EmulatedDevice(link=link)
        start = device.now_s
        for number, direction in enumerate(directions):
            host, vram = device.alloc_host(10**7).range(), device.alloc(10**7).range()
            parts = (vram, host) if direction == "h2d" else (host, vram)
            device.copy(device.stream(f"{direction}{number}"), [parts])
        device.synchronize(1)
        return device.now_s - start

    assert seconds("h2d") == pytest.approx(0.01, rel=0.02)
    assert seconds("h2d", "h2d") == pytest.approx(0.02, rel=0.02)
    assert seconds("h2d", "d2h") == pytest.approx(0.0125, rel=0.02)


def test_kernels_share_the_memory_bandwidth(device: EmulatedDevice) -> None:
    vram = device.alloc(28 * MiB)
    start = device.now_s
    for name in ("one", "two"):
        device.launch(device.stream(name), name, lambda: None, reads=[vram.range()])
    device.synchronize(1)
    alone = 28 * MiB / device.card.memory_bandwidth
    assert device.now_s - start == pytest.approx(2 * alone, rel=0.1)


def test_a_lagging_host_holds_the_device_up(device: EmulatedDevice) -> None:
    vram = device.alloc(64)
    for _ in range(100):
        device.launch(device.stream("s"), "tiny", lambda: None, reads=[vram.range()])
    device.synchronize(1)
    assert device.now_s >= 100 * device.link.submit_s


def test_use_lets_time_run_to_where_its_bytes_are(device: EmulatedDevice) -> None:
    host, vram, up = device.alloc_host(16 * MiB), device.alloc(16 * MiB), device.stream("h2d")
    device.host(host.range(), write=True).fill_(3)
    device.copy(up, [(vram.range(), host.range())])
    device.compute_stream().wait(up.record())
    device.use(device.compute_stream(), "sum", reads=[vram.range()])
    assert (vram.raw() == 3).all()
    copied = device.now_s
    device.compute_stream().synchronize(1)
    expected = 16 * MiB / device.card.memory_bandwidth
    assert device.now_s - copied == pytest.approx(expected, rel=0.1)


# Limits and faults


def test_memory_limits(device: EmulatedDevice) -> None:
    assert EmulatedDevice("rtx-4090").capacity_bytes == 24 * 2**30
    assert EmulatedDevice(vram_bytes="1GiB").capacity_bytes == 2**30
    buffers = [device.alloc(16 * MiB) for _ in range(4)]
    with pytest.raises(DeviceOOMError, match=r"1\.00 MiB: 0 B of 64\.00 MiB.*budget"):
        device.alloc(MiB)
    for buffer in buffers:
        device.free(buffer)
    assert (device.used_bytes, device.stats.peak_bytes) == (0, 64 * MiB)
    host = device.alloc_host(5)
    assert device.host_bytes == 5
    device.free(host)
    assert device.host_bytes == 0


def test_an_allocation_fails_on_demand() -> None:
    device = EmulatedDevice(faults=Faults().fail_alloc(2))
    device.alloc(1)
    with pytest.raises(DeviceOOMError, match="injected"):
        device.alloc(1)
    device.alloc(1)
    assert device.used_bytes == 2
    device.faults.fail_alloc()
    with pytest.raises(DeviceOOMError):
        device.alloc(1)


def copy_up(device: EmulatedDevice, fill: int) -> tuple[Range, Range]:
    host, vram = device.alloc_host(64).range(), device.alloc(64).range()
    device.host(host, write=True).fill_(fill)
    device.copy(device.stream("h2d"), [(vram, host)])
    return vram, host


def test_a_failed_copy_is_told_at_the_next_event_and_to_every_reader() -> None:
    device = EmulatedDevice(faults=Faults().fail_copy("h2d", 2))
    up, down, compute = device.stream("h2d"), device.stream("d2h"), device.compute_stream()
    good, _ = copy_up(device, 1)
    before = up.record()
    bad, source = copy_up(device, 2)
    failed = up.record()
    after, _ = copy_up(device, 3)
    later = up.record()
    down.wait(failed)
    to = device.alloc_host(64).range()
    device.copy(down, [(to, bad)])
    before.synchronize(1)
    for _ in range(2):
        with pytest.raises(CopyFailedError, match=r"copy 'h2d' \(#2 on stream 'h2d'\)"):
            failed.synchronize(1)
    assert failed.done()
    later.synchronize(1)
    assert poisoned(bad.raw())
    assert (good.raw() == 1).all()
    assert (after.raw() == 3).all()
    with pytest.raises(CopyFailedError, match="needs bytes"):
        down.synchronize(1)
    with pytest.raises(CopyFailedError, match=r"'attention'.*copy 'h2d'"):
        device.use(compute, "attention", reads=[bad])
    with pytest.raises(CopyFailedError):
        device.launch(compute, "kernel", lambda: None, reads=[bad])
    with pytest.raises(CopyFailedError, match="host's read"):
        device.host(to)
    device.copy(up, [(bad, source)])
    up.synchronize(1)
    device.use(compute, "attention", reads=[bad])
    assert (bad.raw() == 2).all()
    assert device.stats.failed == 2


def test_a_race_is_told_before_the_failure_that_it_met() -> None:
    device = EmulatedDevice(faults=Faults().fail_copy("h2d"))
    bad, source = copy_up(device, 2)
    device.host_work(1.0)
    for reader in (device.use, lambda *a, **k: device.launch(*a, lambda: None, **k)):
        with pytest.raises(RaceError):
            reader(device.compute_stream(), "attention", reads=[bad])
    device.copy(device.stream("h2d"), [(bad, source)])


def test_a_kernel_behind_a_failed_copy_does_not_run() -> None:
    device = EmulatedDevice(faults=Faults().fail_copy("h2d"))
    compute = device.compute_stream()
    bad, _ = copy_up(device, 2)
    compute.wait(device.stream("h2d").record())
    ran: list[int] = []
    out = device.alloc(8).range()
    device.launch(compute, "kernel", lambda: ran.append(1), reads=[bad], writes=[out])
    with pytest.raises(CopyFailedError, match="'kernel'"):
        compute.synchronize(1)
    assert not ran
    with pytest.raises(CopyFailedError, match="'kernel'"):
        device.use(compute, "next", reads=[out])


def test_what_a_kernel_raises_comes_out_as_it_is(device: EmulatedDevice) -> None:
    def broken() -> None:
        raise ZeroDivisionError("in a kernel")

    def calls_back() -> None:
        device.alloc(1)

    stream, out = device.stream("s"), device.alloc(8).range()
    device.launch(stream, "broken", broken, writes=[out])
    with pytest.raises(ZeroDivisionError, match="in a kernel"):
        stream.synchronize(1)
    stream.synchronize(1)
    device.launch(stream, "recursive", calls_back)
    with pytest.raises(ConfigError, match="called back"):
        device.synchronize(1)


def test_a_stalled_copy_meets_the_deadline_and_may_still_end() -> None:
    device = EmulatedDevice(faults=Faults().stall_copy("h2d", 5.0))
    vram, host = copy_up(device, 4)
    event = device.stream("h2d").record()
    start = device.now_s
    with pytest.raises(DeadlineExceededError, match=r"within 2\.0 s"):
        event.synchronize(2.0)
    assert device.now_s - start == pytest.approx(2.0)
    assert not event.done()
    with pytest.raises(RaceError):
        device.free(host.buffer)
    event.synchronize(4.0)
    assert (vram.raw() == 4).all()


def test_waiting_for_what_never_ends_is_a_deadlock() -> None:
    device = EmulatedDevice(faults=Faults().stall_copy("d2h", math.inf))
    host, vram = device.alloc_host(8).range(), device.alloc(8).range()
    device.copy(device.stream("d2h"), [(host, vram)])
    other = device.stream("other")
    other.wait(device.stream("d2h").record())
    device.launch(other, "never", lambda: None)
    with pytest.raises(DeadlockError, match="d2h"):
        other.synchronize(1e9)
    with pytest.raises(DeadlockError):
        device.use(other, "never")


def test_rates_of_faults_are_reproducible() -> None:
    def failures(seed: int) -> list[int]:
        device = EmulatedDevice(faults=Faults(seed, copy_failure_rate=0.3))
        for fill in range(100):
            copy_up(device, fill)
        with pytest.raises(CopyFailedError):
            device.synchronize(1)
        return [i for i, entry in enumerate(device.trace) if entry.error]

    assert failures(1) == failures(1) != failures(2)
    assert 15 <= len(failures(1)) <= 45
    for wrong in ({"copy_failure_rate": 1.1}, {"stall_rate": -1.0}, {"stall_s": math.nan}):
        with pytest.raises(ConfigError):
            Faults(**wrong)
    with pytest.raises(ConfigError, match="nth"):
        Faults().fail_copy("h2d", 0)
    with pytest.raises(ConfigError, match="sideways"):
        Faults().fail_copy("sideways")  # type: ignore[arg-type]


@pytest.mark.parametrize("refusal", ["device", "fault"])
def test_without_pinning_copies_are_slow_block_and_say_so_once(refusal: str) -> None:
    if refusal == "device":
        device = EmulatedDevice(pinned=False)
    else:
        device = EmulatedDevice(faults=Faults().refuse_pinning(beyond_bytes=MiB))
        assert device.alloc_host(MiB).kind == "pinned"
    with pytest.warns(OffloadWarning, match=r"5\.8 GB/s instead of 13\.0.*smaller"):
        host = device.alloc_host(16 * MiB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.alloc_host(16)
    assert host.kind == "pageable"
    vram, start = device.alloc(16 * MiB), device.now_s
    device.copy(device.stream("h2d"), [(vram.range(), host.range())])
    assert device.now_s - start == pytest.approx(16 * MiB / (0.45 * 13e9), rel=0.02)
    with pytest.raises(RaceError):
        device.host(host.range(), write=True)


def test_threads_share_a_device() -> None:
    device = EmulatedDevice()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            stream = device.stream(f"thread {number}")
            host, vram = device.alloc_host(256), device.alloc(256)
            with device.on(stream):
                for step in range(50):
                    assert device.compute_stream() is stream
                    device.host(host.range(), write=True).fill_(step)
                    device.copy(stream, [(vram.range(), host.range())])
                    device.use(device.compute_stream(), "check", reads=[vram.range()])
                    assert (vram.raw() == step).all()
                    stream.synchronize(1)
            device.free(vram)
            device.free(host)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert device.used_bytes == device.host_bytes == 0
    assert device.stats.copies["h2d"] == 200
