"""A rank's trace as steps: how long each took, and how much of that it computed, communicated and waited.

A step goes from a forward of the model to the first forward behind the next `backward` and `update`, so that accumulated
micro-batches are one step. Within a step of length T

    C    compute   forward, backward and update, without the waiting inside them (a layer may wait for its parameters)
    N    network   at least one transfer or message of this rank is on its way
    wait           the training thread waits for a collective
    late           it waits and nothing is on its way: somebody else is not ready yet
    other          none of these: data loading, logging, Python between the calls

    alpha = (N + C - T) / min(N, C)    overlap: 1 if the shorter of the two is hidden behind the longer, 0 if they take turns
    rho   = N / C                      above 1 the network needs longer than the computation
    U     = C / T                      the share of the step in which this rank computes

A span in flight begins when a rank is ready for it, which may be long before the other side is. So it counts from when both are:
a receive from when the peer's send has begun, a transfer from when all ranks have begun it. Otherwise a slow worker would look
like a slow network.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from stretto.observe.trace import TraceEvent, TraceFile
from stretto.report.intervals import Interval, Intervals, covered, difference, union

COMPUTE = ("compute", "update")
IN_FLIGHT = ("transfer", "send", "receive")
MICRO = 1e-6


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank. Times are seconds, except `begin_us`, which is on the trace's own axis."""

    begin_us: float
    length_s: float
    compute_s: float
    network_s: float
    wait_s: float
    late_s: float
    other_s: float
    bytes_sent: int
    num_transfers: int  # where the trace has none: messages that this rank sent
    transfer_bytes: int

    @property
    def overlap(self) -> float | None:
        """alpha, at least 0 and at most 1; None where nothing was computed or nothing communicated."""
        shorter = min(self.network_s, self.compute_s)
        if shorter <= 0.0:
            return None
        return min(1.0, max(0.0, (self.network_s + self.compute_s - self.length_s) / shorter))

    @property
    def network_to_compute(self) -> float | None:
        """rho; None where nothing was computed."""
        return self.network_s / self.compute_s if self.compute_s > 0.0 else None

    @property
    def utilisation(self) -> float:
        """U."""
        return min(1.0, self.compute_s / self.length_s)


def spans_of(file: TraceFile) -> list[TraceEvent]:
    return [event for event in file.traceEvents if event.ph == "X"]


def interval_of(span: TraceEvent) -> Interval:
    return span.ts, span.ts + (span.dur or 0.0)


class OtherSides:
    """For every span in flight, when the other ranks were ready for it too."""

    def __init__(self, files: Sequence[TraceFile]) -> None:
        begun: dict[tuple[object, ...], dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
        for file in files:
            rank = file.otherData.rank
            for span in spans_of(file):
                if span.cat == "transfer":
                    begun["transfer", span.name][rank].append(interval_of(span))
                elif span.cat == "send":
                    begun["send", rank, span.args.get("peer")][rank].append(interval_of(span))
        self._ready = {key: _ready_times(ranks.values()) for key, ranks in begun.items()}

    def in_flight(self, rank: int, span: TraceEvent) -> Interval:
        """From when this rank and its other side have both begun."""
        begin, end = interval_of(span)
        key = ("send", span.args.get("peer"), rank) if span.cat == "receive" else (span.cat, span.name)
        since, ready = self._ready.get(key, ([], []))
        at = bisect_left(since, begin)
        return min(end, max(begin, ready[at - 1])) if at else begin, end


def _ready_times(ranks: Iterable[Iterable[Interval]]) -> tuple[list[float], list[float]]:
    """Two columns: whoever begins after `since` (the last such line counts) does so with the others only from `ready` on.

    A rank is ready for what begins at t when the first of its own spans begins that ends at t or later: those that ended before
    are of earlier messages. That grows with t, so the readiness of all ranks is a running maximum, which takes n log n, also with
    a thousand ranks. After the last end of a rank its line stays, and does nothing: it is earlier than t.
    """
    lines: list[Interval] = []
    for spans in ranks:
        by_end = sorted(spans, key=lambda interval: interval[1])
        first_begins = list(itertools.accumulate((begin for begin, _ in reversed(by_end)), min))[::-1]
        lines.extend(zip([float("-inf"), *(end for _, end in by_end)], first_begins, strict=False))
    lines.sort()
    return [since for since, _ in lines], list(itertools.accumulate((ready for _, ready in lines), max))


def measure_steps(file: TraceFile, others: OtherSides) -> list[MeasuredStep]:
    """The steps of one rank, without the last: nothing says where that ended (unless it is the only one)."""
    spans = spans_of(file)
    begins = step_begins(spans)
    if not begins:
        return []
    ends = begins[1:] or [max(interval_of(span)[1] for span in spans if span.cat in COMPUTE)]
    compute, wait = compute_and_wait(spans)
    flying = [span for span in spans if span.cat in IN_FLIGHT]
    network = union(others.in_flight(file.otherData.rank, span) for span in flying)
    late = difference(wait, network)
    busy = union([*compute, *network, *wait])
    counted = "transfer" if any(span.cat == "transfer" for span in flying) else "send"
    transfers = _per_step(begins, ((span.ts, 1) for span in flying if span.cat == counted))
    moved = _per_step(begins, ((span.ts, span.args.get("bytes", 0)) for span in flying if span.cat == counted))
    sent = _per_step(begins, ((span.ts, span.args.get("bytes", 0)) for span in flying if span.cat == "send"))
    return [
        MeasuredStep(
            begin_us=begin,
            length_s=(end - begin) * MICRO,
            compute_s=covered(compute, begin, end) * MICRO,
            network_s=covered(network, begin, end) * MICRO,
            wait_s=covered(wait, begin, end) * MICRO,
            late_s=covered(late, begin, end) * MICRO,
            other_s=max(0.0, end - begin - covered(busy, begin, end)) * MICRO,
            bytes_sent=sent[number],
            num_transfers=transfers[number],
            transfer_bytes=moved[number],
        )
        for number, (begin, end) in enumerate(zip(begins, ends, strict=False))
        if end > begin
    ]


def _per_step(begins: Sequence[float], amounts: Iterable[tuple[float, int]]) -> Counter[int]:
    """What the spans of each step add up to, by the number of the step; -1 is what was before the first."""
    added: Counter[int] = Counter()
    for moment, amount in amounts:
        added[bisect_right(begins, moment) - 1] += amount
    return added


def compute_and_wait(spans: Sequence[TraceEvent]) -> tuple[Intervals, Intervals]:
    """When this rank computed, and when a thread that computes waited: what it waits inside a forward is not computing."""
    by_thread: dict[int, tuple[list[Interval], list[Interval]]] = defaultdict(lambda: ([], []))
    for span in spans:
        if span.cat in COMPUTE:
            by_thread[span.tid][0].append(interval_of(span))
        elif span.cat == "wait":
            by_thread[span.tid][1].append(interval_of(span))
    computed: Intervals = []
    waited: Intervals = []
    for computing, waiting in by_thread.values():
        if computing:
            waits = union(waiting)
            computed.extend(difference(union(computing), waits))
            waited.extend(waits)
    return union(computed), union(waited)


def step_begins(spans: Sequence[TraceEvent]) -> list[float]:
    """When the steps begin: at the first forward of the model, and at the first behind each backward and update.

    A trace without updates (the script has no optimizer) goes by backward alone, one without backward by forward alone.
    """
    passes = _outermost(span for span in spans if span.cat == "compute")
    model = _stepping_model(passes)
    updates = [span.ts for span in spans if span.cat == "update" and span.name == "update"]
    moments = [(moment, "update") for moment in updates]
    for span in passes:
        if span.name == f"forward {model}":
            moments.append((span.ts, "forward"))
        elif span.name == f"backward {model}":
            moments.append((interval_of(span)[1], "backward"))
    has_backward = any(kind == "backward" for _, kind in moments)
    begins: list[float] = []
    went_back = updated = False
    for moment, kind in sorted(moments):
        if kind == "backward":
            went_back = True
        elif kind == "update":
            updated = updated or went_back
        elif not begins or not has_backward or (went_back and (updated or not updates)):
            begins.append(moment)
            went_back = updated = False
    return begins


def _outermost(spans: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Those that no other contains: a model inside a model, or a forward that backward repeats, begins no step."""
    kept: list[TraceEvent] = []
    until = float("-inf")
    for span in sorted(spans, key=lambda span: (span.ts, -(span.dur or 0.0))):
        end = interval_of(span)[1]
        if end > until:
            kept.append(span)
            until = end
    return kept


def _stepping_model(passes: Sequence[TraceEvent]) -> str:
    """The model whose forwards begin the steps. Of several (a GAN's), that with the fewest backwards: a step has all of them."""
    forwards = Counter(span.name.removeprefix("forward ") for span in passes if span.name.startswith("forward "))
    backwards = Counter(span.name.removeprefix("backward ") for span in passes if span.name.startswith("backward "))
    trained = [name for name in forwards if backwards[name]]
    return min(trained or list(forwards), key=lambda name: backwards[name], default="")
