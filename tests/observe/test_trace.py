"""Spans, the file they end in, and the clocks that bring ranks together."""

from __future__ import annotations

import json
import random
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectives.ranks import integers
from stretto.collectives import catalogue
from stretto.collectives.execute import Communicator
from stretto.collectives.plan import Kind
from stretto.collectives.request import Request
from stretto.distributing import distribute
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.launching.detect import Launch, detect
from stretto.launching.peers import Peer
from stretto.observe import compute, ledger, trace
from stretto.observe.clocks import enclose
from stretto.observe.merge import merge, missing_ranks, read, total
from stretto.observe.trace import About, Span, TraceEvent, TraceFile, Tracer, lanes
from stretto.testing import run_threads
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire
from stretto.wire.frames import HEADER_BYTES

ABOUT = About(
    rank=0, world_size=1, run="", host="here", num_spans=0, num_dropped=0, clock_offset_ns=0, clock_uncertainty_ns=0
)  # fmt: skip


def launch_of(rank: int, size: int, folder: Path | None) -> Launch:
    return Launch(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, rendezvous=None, secret=None, encrypt=False,
        launcher="stretto", trace=None if folder is None else str(folder),
    )  # fmt: skip


def job_on(wire: Wire | None, rank: int, size: int, folder: Path | None) -> Job:
    peers = [Peer(each, each, "here", "127.0.0.1:1", 1) for each in range(size)]
    return Job(launch_of(rank, size, folder), peers, wire, Timeouts(arrive_s=30.0))


def train(job: Job, steps: int = 3) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distribute(model, optimizer, "Strategy(aggregate=AllReduce('ring'))", job=job)
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_with_trace(size: int, folder: Path) -> list[dict[str, Any]]:
    def program(wire: Wire) -> None:
        job = job_on(wire, wire.rank, wire.world_size, folder)
        job.begin_trace()
        train(job)
        job.close(goodbye=True)

    run_threads(size, program)
    return [json.loads(trace.file_of(folder, rank).read_text()) for rank in range(size)]


def complete(file: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in file["traceEvents"] if event["ph"] == "X"]


def is_nested(events: list[dict[str, Any]]) -> bool:
    """On every track, two spans are disjoint or one is inside the other (to the nanosecond)."""
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        tracks.setdefault(event["tid"], []).append((begin, begin + length))
    for spans in tracks.values():
        stack: list[tuple[int, int]] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1][1] <= begin:
                stack.pop()
            if stack and end > stack[-1][1]:
                return False
            stack.append((begin, end))
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_trained_model_leaves_a_file_per_rank_with_all_that_perfetto_needs(size: int, tmp_path: Path) -> None:
    files = trained_with_trace(size, tmp_path)

    waited = False
    for rank, file in enumerate(files):
        spans = complete(file)
        assert all({"ph", "ts", "dur", "pid", "tid", "name"} <= set(event) for event in spans)
        assert all(event["dur"] >= 0 and event["pid"] == rank for event in spans)
        assert is_nested(spans)
        by_name = {event["name"] for event in spans}
        assert {"forward Sequential", "backward Sequential", "update"} <= by_name
        categories = {event["cat"] for event in spans}
        waited |= "wait" in categories  # not on a rank that always comes last
        of_the_wire = {"send", "receive", "reduce", "transfer"} if size > 1 else set()
        assert categories - {"wait"} == {"compute", "module", "update"} | of_the_wire
        named = {event["tid"] for event in file["traceEvents"] if event["name"] == "thread_name"}
        assert named == {event["tid"] for event in spans}
        assert file["otherData"]["rank"] == rank and file["otherData"]["num_dropped"] == 0
    assert waited == (size > 1)


def test_each_step_has_one_forward_one_backward_and_one_update_in_this_order(tmp_path: Path) -> None:
    for file in trained_with_trace(2, tmp_path):
        order = [event["name"].split()[0] for event in sorted(complete(file), key=lambda event: event["ts"])]
        assert [name for name in order if name in ("forward", "backward", "update")] == ["forward", "backward", "update"] * 3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bytes_of_the_spans_and_of_the_ledger_are_those_of_the_wire(size: int) -> None:
    def program(wire: Wire) -> None:
        tracer = Tracer()
        communicator = Communicator(wire, Timeouts(arrive_s=30.0), tracer=tracer)
        for number, algorithm in enumerate(("ring", "butterfly", "direct", "double_binary_tree")):
            plan = catalogue.plan(Kind.ALL_REDUCE, algorithm, wire.rank, wire.world_size)
            communicator.start(Request(plan, integers(wire.rank, 1001), "sum", 1, number)).wait()
        sends = [span for span in tracer.spans if span.category == "send"]
        received = [span for span in tracer.spans if span.category == "receive"]
        assert sum(span.num_bytes + HEADER_BYTES for span in sends) == wire.bytes_sent  # small ones need no control messages
        book = communicator.ledger
        assert book.bytes_sent == sum(span.num_bytes for span in sends)
        assert book.bytes_received == sum(span.num_bytes for span in received)
        for peer in range(size):
            assert book.sent_to(peer) == sum(span.num_bytes for span in sends if span.peer == peer)
            assert book.received_from(peer) == sum(span.num_bytes for span in received if span.peer == peer)
        assert book.collectives == {"all_reduce": 4}

    run_threads(size, program)


def test_synchronous_training_is_never_stale_and_waiting_is_counted() -> None:
    def program(wire: Wire) -> ledger.Ledger:
        job = job_on(wire, wire.rank, wire.world_size, None)
        train(job, steps=5)
        job.close(goodbye=True)
        return job.ledger

    for book in run_threads(2, program):
        assert book.staleness == {0: 5} and book.waited_s > 0
        assert "rounds=5" in repr(book)


def test_without_a_trace_there_is_no_tracer_and_nothing_is_allocated_for_it() -> None:
    files = [trace.__file__, compute.__file__]

    def program(wire: Wire) -> int:
        job = job_on(wire, wire.rank, wire.world_size, None)
        assert job.tracer is None
        train(job)
        job.close(goodbye=True)
        return 0

    tracemalloc.start()
    try:
        run_threads(2, program)
        taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, name) for name in files])
    finally:
        tracemalloc.stop()
    assert sum(each.size for each in taken.statistics("filename")) == 0


def test_no_more_than_the_limit_is_kept_and_the_file_says_what_was_dropped(tmp_path: Path) -> None:
    job = job_on(None, 0, 1, tmp_path)
    job.tracer = Tracer(limit=10)
    for number in range(25):
        job.tracer.span("compute", f"step {number}", job.tracer.now())
    job.close(goodbye=False)

    file = json.loads(trace.file_of(tmp_path, 0).read_text())
    assert [event["name"] for event in complete(file)] == [f"step {number}" for number in range(15, 25)]
    assert file["otherData"]["num_dropped"] == 15 and file["otherData"]["num_spans"] == 10


@pytest.mark.parametrize("nesting", [True, False])
def test_lanes_hold_any_spans_without_one_reaching_over_the_end_of_another(nesting: bool) -> None:
    generator = random.Random(7)
    for _ in range(200):
        starts = [generator.randrange(50) for _ in range(20)]
        spans = [Span("send", "send", 0, start, start + generator.randrange(20)) for start in starts]
        made = lanes(spans, nesting=nesting)
        assert sorted(span for lane in made for span in lane) == sorted(spans)
        for lane in made:
            events = [{"tid": 0, "ts": span.begin_ns / 1000, "dur": (span.end_ns - span.begin_ns) / 1000} for span in lane]
            assert is_nested(events)
            if not nesting:
                longer = sorted((span for span in lane if span.end_ns > span.begin_ns), key=lambda span: span.begin_ns)
                assert all(a.end_ns <= b.begin_ns for a, b in zip(longer, longer[1:], strict=False))


def test_spans_come_from_any_thread_and_keep_its_name() -> None:
    tracer = Tracer()
    threads = [threading.Thread(target=lambda: tracer.span("wait", "w", tracer.now()), name=f"t{n}") for n in range(3)]
    for thread in threads:
        thread.start()
        thread.join()  # one after the other: their numbers may be the same
    named = [event.args["name"] for event in trace.events(tracer, ABOUT) if event.name == "thread_name"]
    assert named and all(name.startswith("t") for name in named)


def test_the_middle_of_what_barriers_allow_is_the_offset_and_zero_if_that_is_possible() -> None:
    barriers = [(100, 150), (200, 220)]
    shifted = [(entry + 10_000, leave + 10_000) for entry, leave in barriers]

    assert enclose(shifted, barriers) == (10_000, 20)
    assert enclose([(110, 160), (205, 215)], barriers)[0] == 0


def test_a_backward_that_raises_leaves_no_span_and_the_next_one_does() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
            raise ArithmeticError("on purpose")

    tracer, model = Tracer(), nn.Linear(2, 2)
    compute.trace_compute(tracer, model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(ArithmeticError):
        model(Breaks.apply(torch.ones(1, 2, requires_grad=True))).sum().backward()  # type: ignore[no-untyped-call]
    assert [span.name for span in tracer.spans] == ["forward Linear"]
    model(torch.ones(1, 2)).sum().backward()
    passes = [span.name for span in tracer.spans if span.category == "compute"]
    assert passes == ["forward Linear", "forward Linear", "backward Linear"]


# -- merging ----------------------------------------------------------------------------------------------------------


def test_merged_files_have_a_process_per_rank_and_begin_at_zero(tmp_path: Path) -> None:
    trained_with_trace(3, tmp_path)
    files = read(tmp_path)
    sums = [total(file) for file in files]
    merged = json.loads(merge(files))

    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2} and min(event["ts"] for event in spans) == 0
    assert sum(each.bytes_sent for each in sums) == sum(each.bytes_received for each in sums) > 0
    assert all(0 < each.computed <= 1 and 0 <= each.waited <= 1 for each in sums)
    trace.file_of(tmp_path, 1).unlink()
    assert missing_ranks(read(tmp_path)) == [1]


def test_shares_are_of_the_training_and_not_of_what_came_before_it() -> None:
    def span(category: str, begin_ms: float, end_ms: float, num_bytes: int = 0) -> TraceEvent:
        duration = (end_ms - begin_ms) * 1000
        return TraceEvent("X", category, 0, 0, begin_ms * 1000, duration, category, {"bytes": num_bytes} if num_bytes else {})

    start_up = [span("wait", 0, 700), span("send", 0, 10, 64), span("wait", 790, 810)]  # links are measured for most of a second
    steps = [span("compute", 800, 850), span("wait", 850, 870), span("update", 870, 880), span("send", 851, 900, 36)]
    found = total(TraceFile([*start_up, *steps], ABOUT))

    assert found.start_up_s == pytest.approx(0.8) and found.training_s == pytest.approx(0.1)
    assert found.computed == pytest.approx(0.6) and found.waited == pytest.approx(0.3)  # 10 ms of the wait at its beginning
    assert (found.start_up_bytes, found.bytes_sent) == (64, 36)
    without_model = total(TraceFile(start_up, ABOUT))
    assert without_model.start_up_s == 0 and without_model.waited == pytest.approx(720 / 810)


def test_files_that_do_not_belong_together_or_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="stretto run --trace"):
        read(tmp_path)
    job_on(None, 0, 1, tmp_path).close(goodbye=False)
    other = (
        trace.file_of(tmp_path, 0)
        .read_text()
        .replace('"rank":0,"world_size":1,"run":""', '"rank":1,"world_size":2,"run":"other"')
    )
    trace.file_of(tmp_path, 1).write_text(other)
    with pytest.raises(ConfigurationError, match="different runs"):
        read(tmp_path)
    trace.file_of(tmp_path, 1).write_text("{}")
    with pytest.raises(ConfigurationError, match="not a trace"):
        read(tmp_path)


def test_the_folder_comes_from_the_environment_and_must_be_writable(tmp_path: Path) -> None:
    assert detect({"STRETTO_TRACE": "there"}).trace == "there" and detect({}).trace is None
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be made"):
        trace.prepare(tmp_path / "file" / "folder")
