"""Steps out of spans, and what is measured of each: traces made by hand, whose figures are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from report.traces import job, span, step, trace
from stretto.observe.trace import TraceEvent
from stretto.report.figures import job_figures
from stretto.report.intervals import covered, difference, union
from stretto.report.steps import MeasuredStep, OtherSides, compute_and_wait, measure_steps, step_begins

sets_of_moments = draw.lists(draw.tuples(draw.integers(0, 30), draw.integers(0, 30)).map(lambda pair: tuple(sorted(pair))))


def moments(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit intervals in a set of whole ones."""
    return {at for begin, end in intervals for at in range(int(begin), int(end))}


@given(sets_of_moments, sets_of_moments, draw.integers(0, 30), draw.integers(0, 30))
def test_intervals_are_sets_of_moments(left: list[tuple[int, int]], right: list[tuple[int, int]], one: int, two: int) -> None:
    first, second = union(left), union(right)

    assert moments(first) == moments(list(left)) and first == sorted(first)
    assert all(before[1] < after[0] for before, after in zip(first, first[1:], strict=False))
    assert moments(difference(first, second)) == moments(first) - moments(second)
    begin, end = sorted((one, two))
    assert covered(first, begin, end) == len(moments(first) & set(range(begin, end)))


def test_a_step_has_the_times_that_were_drawn() -> None:
    """60 ms computed, from 40 to 90 sent, 30 waited, and so 10 ms (90 to 100) of nothing but the moment of update."""
    files = job({"compute": 60.0, "network": [(40.0, 90.0)], "wait": 30.0}, {"compute": 60.0})
    figures = measure_steps(files[0], OtherSides(files))[1]

    assert figures.length_s == pytest.approx(0.1)
    assert figures.compute_s == pytest.approx(0.06)
    assert figures.network_s == pytest.approx(0.05)
    assert figures.wait_s == pytest.approx(0.03) and figures.late_s == pytest.approx(0.0)
    assert figures.other_s == pytest.approx(0.01, abs=3e-5)
    assert figures.bytes_sent == 1_000_000 and figures.num_transfers == 1
    assert figures.overlap == pytest.approx((50 + 60 - 100) / 50)
    assert figures.network_to_compute == pytest.approx(50 / 60)
    assert figures.utilisation == pytest.approx(0.6)


def measured(**times: float) -> MeasuredStep:
    zero = {"begin_us": 0.0, "length_s": 1.0, "compute_s": 0.0, "network_s": 0.0, "wait_s": 0.0, "late_s": 0.0, "other_s": 0.0}
    return MeasuredStep(**{**zero, **times}, bytes_sent=0, num_transfers=0, transfer_bytes=0)


@pytest.mark.parametrize(
    ("compute", "network", "overlap", "rho"),
    [
        (1.0, 0.5, 1.0, 0.5),  # all hidden
        (0.5, 0.5, 0.0, 1.0),  # they take turns
        (0.3, 0.3, 0.0, 1.0),  # and there is a pause: not below 0
        (0.75, 0.5, 0.5, 2 / 3),
        (0.5, 0.0, None, 0.0),  # nothing communicated: there is nothing to hide
        (0.0, 0.5, None, None),
    ],
)
def test_overlap_is_between_0_and_1_or_unknown(compute: float, network: float, overlap: float | None, rho: float | None) -> None:
    made = measured(compute_s=compute, network_s=network)
    assert made.overlap == pytest.approx(overlap) and made.network_to_compute == pytest.approx(rho)


def test_the_last_step_does_not_count_unless_it_is_the_only_one() -> None:
    spans = step(0, 100, compute=60) + step(100, 500, compute=60)
    assert [each.length_s for each in measure_steps(trace(0, spans), OtherSides([]))] == [pytest.approx(0.1)]
    assert [each.length_s for each in measure_steps(trace(0, spans[:3]), OtherSides([]))] == [pytest.approx(0.1)]
    assert measure_steps(trace(0, []), OtherSides([])) == []


def passes(*names: str) -> list[TraceEvent]:
    """Spans of 1 ms, one behind the other; `update` is one, all others are compute."""
    return [span("update" if name == "update" else "compute", name, at, at + 1) for at, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "begins"),
    [
        (("forward A", "backward A", "update") * 3, [0, 3, 6]),
        (("forward A", "backward A", "forward A", "backward A", "update") * 2, [0, 5]),  # micro-batches are one step
        (("forward A", "backward A") * 2, [0, 2]),  # no optimizer
        (("forward A", "forward A", "forward A"), [0, 1, 2]),  # only evaluation
        (("forward A", "forward A", "backward A", "update") * 2, [0, 4]),  # a model that is called twice
        (("forward A", "backward A", "update", "forward A", "forward A", "backward A", "update"), [0, 3]),  # an evaluation
        (("forward G", "forward D", "backward D", "update", "forward D", "backward G", "backward D", "update") * 2, [0, 8]),
        ((), []),
    ],
)
def test_a_step_begins_with_the_first_forward_after_backward_and_update(names: tuple[str, ...], begins: list[int]) -> None:
    assert step_begins(passes(*names)) == [begin * 1000 for begin in begins]


def test_forwards_inside_another_pass_begin_no_step() -> None:
    """A model that calls itself, and one whose forward is repeated in backward."""
    one = [
        span("compute", "forward A", 0, 10),
        span("compute", "forward A", 2, 4),
        span("compute", "backward A", 10, 30),
        span("compute", "forward A", 12, 14),
        span("update", "update", 30, 31),
    ]
    two = [span(each.cat, each.name, each.ts / 1e3 + 40, each.ts / 1e3 + (each.dur or 0) / 1e3 + 40) for each in one]
    assert step_begins(one + two) == [0, 40_000]


def test_an_update_of_single_parameters_ends_no_step() -> None:
    """Across the barrier parameters are updated under the next forward; only `optimizer.step()` is called `update`."""
    spans = passes("forward A", "backward A", "evaluate", "forward A", "backward A", "update", "forward A")
    assert step_begins(spans) == [0, 6_000]
    spans.append(span("update", "update of transfer 1", 2.2, 2.4, tid=9))
    assert step_begins(spans) == [0, 6_000]


def test_waiting_inside_a_forward_is_not_computing() -> None:
    """The wait of another thread takes nothing off, and its update is computing."""
    spans = [
        span("compute", "forward A", 0, 10),
        span("wait", "wait all_reduce", 2, 5),
        span("wait", "wait all_reduce", 6, 9, tid=7),
        span("update", "update of transfer 1", 3, 4, tid=8),
    ]
    compute, wait = compute_and_wait(spans)
    assert compute == [(0, 2000), (3000, 4000), (5000, 10000)] and wait == [(2000, 5000)]


@pytest.mark.parametrize("category", ["transfer", "receive"])
def test_a_late_worker_does_not_look_like_a_slow_network(category: str) -> None:
    """Rank 0 is ready after 60 ms, rank 1 after 90; both end at 95. So 5 ms are the network's, on both."""
    fast, late = step(0, 100, compute=60, wait=35), step(0, 100, compute=90, wait=5)
    if category == "transfer":
        fast.append(span("transfer", "transfer 0", 60, 95, bytes=100))
        late.append(span("transfer", "transfer 0", 90, 95, bytes=100))
    else:
        fast.append(span("receive", "receive from 1", 60, 95, peer=1, bytes=100))
        late.append(span("send", "send to 0", 90, 95, peer=0, bytes=100))
        late.append(span("send", "send to 0", 10, 11, peer=0, bytes=100))  # an earlier message
    files = [trace(0, fast), trace(1, late)]
    others = OtherSides(files)

    assert measure_steps(files[0], others)[0].network_s == pytest.approx(0.005)
    assert measure_steps(files[1], others)[0].network_s == pytest.approx(0.005 if category == "transfer" else 0.006)
    alone = measure_steps(files[0], OtherSides(files[:1]))[0]  # rank 1 left no trace: nothing says when it was ready
    assert alone.network_s == pytest.approx(0.035)


whole_spans = draw.lists(
    draw.tuples(draw.integers(0, 20), draw.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=5
)


@given(draw.lists(whole_spans, min_size=1, max_size=4))
def test_a_transfer_is_in_flight_when_all_ranks_have_begun_one_that_did_not_end_before(
    ranks: list[list[tuple[int, int]]],
) -> None:
    files = [trace(rank, [span("transfer", "t", *each) for each in spans], world_size=4) for rank, spans in enumerate(ranks)]
    others = OtherSides(files)
    for file in files:
        for each in file.traceEvents:
            begin, end = each.ts / 1e3, (each.ts + (each.dur or 0.0)) / 1e3
            first = [min((b for b, e in spans if e >= begin), default=begin) for spans in ranks]
            assert others.in_flight(file.otherData.rank, each) == (min(end, max(begin, *first)) * 1e3, end * 1e3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_bytes_are_counted_per_link_from_the_first_step_on(world_size: int) -> None:
    files = job(*[{"compute": 60.0, "network": [(0.0, 50.0)], "messages": 3, "num_bytes": 10} for _ in range(world_size)])
    for file in files:
        peer = (file.otherData.rank + 1) % world_size
        file.traceEvents.append(span("send", "at the start", -50, -40, peer=peer, bytes=999))
    job_of_all = job_figures(files)

    assert [(link.source, link.target) for link in job_of_all.links] == [
        (rank, (rank + 1) % world_size) for rank in range(world_size)
    ]
    assert all(link.num_bytes == 4 * 3 * 10 and link.num_messages == 12 for link in job_of_all.links)
    assert job_of_all.bytes_sent == 30 and job_of_all.num_transfers == 3
    assert job_of_all.num_steps == 4 * world_size and job_of_all.step_s == pytest.approx(0.1)


def test_ranks_that_left_no_trace_and_transfers_are_in_the_figures() -> None:
    spans = step(0, 100, compute=60) + [
        span("transfer", "transfer 3", 10, 20, bytes=5),
        span("transfer", "transfer 3", 50, 80, bytes=5),
    ]
    figures = job_figures([trace(2, spans, world_size=4, dropped=7)])

    assert figures.missing == (0, 1, 3) and figures.ranks[0].num_dropped == 7
    assert figures.transfers["transfer 3"].count == 2 and figures.transfers["transfer 3"].median_s == pytest.approx(0.02)
    assert figures.num_transfers == 2 and figures.transfer_bytes == 10
