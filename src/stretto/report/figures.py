"""The job in figures: medians over the steps of all ranks, each rank beside the others, bytes per link, each transfer's time.

Medians, because the first step and those with an evaluation in them are not like the others.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stretto.observe.merge import missing_ranks
from stretto.observe.trace import TraceEvent, TraceFile
from stretto.report.servers import ServersFigures, servers_figures
from stretto.report.steps import MICRO, MeasuredStep, OtherSides, measure_steps, spans_of


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: medians over its steps, in seconds, and what its file says of itself."""

    rank: int
    host: str
    num_steps: int
    step_s: float
    compute_s: float
    network_s: float
    wait_s: float
    other_s: float
    overlap: float | None
    utilisation: float | None
    num_dropped: int
    clock_uncertainty_s: float


class LinkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sent to another in its steps (without steps: in all of the trace)."""

    source: int
    target: int
    num_bytes: int
    num_messages: int


class TransferTime(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer of the plan as it was measured, over all ranks and steps: median seconds from when all ranks had begun it."""

    median_s: float
    count: int


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the page and the sentence are made of. Medians are over all steps of all ranks, None where there is no step."""

    world_size: int
    ranks: tuple[RankFigures, ...]
    missing: tuple[int, ...]
    links: tuple[LinkTraffic, ...]
    transfers: dict[str, TransferTime]
    num_steps: int  # of all ranks together
    servers: ServersFigures | None = None
    step_s: float | None = None
    step_low_s: float | None = None  # a tenth of the steps is shorter,
    step_high_s: float | None = None  # and a tenth longer
    compute_s: float = 0.0
    network_s: float = 0.0
    wait_s: float = 0.0
    late_s: float = 0.0
    other_s: float = 0.0
    overlap: float | None = None
    network_to_compute: float | None = None
    utilisation: float | None = None
    bytes_sent: float = 0.0  # by one rank in one step
    num_transfers: float = 0.0  # by one rank in one step; where the trace has no transfers, messages sent
    transfer_bytes: float = 0.0  # of all these together


def job_figures(files: Sequence[TraceFile], servers: Sequence[TraceFile] = ()) -> JobFigures:
    others = OtherSides(files)
    steps = {file.otherData.rank: measure_steps(file, others) for file in files}
    everything = [step for each in steps.values() for step in each]
    lengths = [step.length_s for step in everything]
    return JobFigures(
        world_size=files[0].otherData.world_size,
        ranks=tuple(_rank_figures(file, steps[file.otherData.rank]) for file in files),
        missing=tuple(missing_ranks(files)),
        links=tuple(_links(files, steps, servers)),
        servers=servers_figures(files, servers),
        transfers=_transfers(files, others),
        num_steps=len(everything),
        step_s=_median(lengths),
        step_low_s=_quantile(lengths, 0.1),
        step_high_s=_quantile(lengths, 0.9),
        compute_s=_of(everything, lambda step: step.compute_s),
        network_s=_of(everything, lambda step: step.network_s),
        wait_s=_of(everything, lambda step: step.wait_s),
        late_s=_of(everything, lambda step: step.late_s),
        other_s=_of(everything, lambda step: step.other_s),
        overlap=_median(step.overlap for step in everything),
        network_to_compute=_median(step.network_to_compute for step in everything),
        utilisation=_median(step.utilisation for step in everything),
        bytes_sent=_of(everything, lambda step: step.bytes_sent),
        num_transfers=_of(everything, lambda step: step.num_transfers),
        transfer_bytes=_of(everything, lambda step: step.transfer_bytes),
    )


def _rank_figures(file: TraceFile, steps: Sequence[MeasuredStep]) -> RankFigures:
    about = file.otherData
    return RankFigures(
        rank=about.rank,
        host=about.host,
        num_steps=len(steps),
        step_s=_of(steps, lambda step: step.length_s),
        compute_s=_of(steps, lambda step: step.compute_s),
        network_s=_of(steps, lambda step: step.network_s),
        wait_s=_of(steps, lambda step: step.wait_s),
        other_s=_of(steps, lambda step: step.other_s),
        overlap=_median(step.overlap for step in steps),
        utilisation=_median(step.utilisation for step in steps),
        num_dropped=about.num_dropped,
        clock_uncertainty_s=about.clock_uncertainty_ns / 1e9,
    )


def _links(files: Sequence[TraceFile], steps: dict[int, list[MeasuredStep]], servers: Sequence[TraceFile]) -> list[LinkTraffic]:
    """What a server has sent to a worker is known from what that worker has received."""
    num_bytes: Counter[tuple[int, int]] = Counter()
    num_messages: Counter[tuple[int, int]] = Counter()
    for file in files:
        rank = file.otherData.rank
        since = steps[rank][0].begin_us if steps[rank] else float("-inf")
        for span in spans_of(file):
            if span.ts >= since and (link := _link_of(rank, span, file.otherData.world_size)) is not None:
                num_bytes[link] += span.args.get("bytes", 0)
                num_messages[link] += 1
    for file in servers:
        for span in spans_of(file):
            if (link := _link_of(file.otherData.rank, span, file.otherData.world_size)) is not None:
                num_bytes[link] += span.args.get("bytes", 0)
                num_messages[link] += 1
    return [
        LinkTraffic(source=source, target=target, num_bytes=num_bytes[source, target], num_messages=count)
        for (source, target), count in sorted(num_messages.items())
    ]


def _link_of(rank: int, span: TraceEvent, world_size: int) -> tuple[int, int] | None:
    """The sender and the receiver of what this span moved; None if it is counted elsewhere."""
    peer = span.args.get("peer", -1)
    if span.cat == "send" and peer >= 0:
        return rank, peer
    return (peer, rank) if span.cat == "receive" and peer >= world_size else None


def _transfers(files: Sequence[TraceFile], others: OtherSides) -> dict[str, TransferTime]:
    """By name, such as `transfer 3`."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for file in files:
        for span in spans_of(file):
            if span.cat == "transfer":
                begin, end = others.in_flight(file.otherData.rank, span)
                lengths[span.name].append((end - begin) * MICRO)
    return {name: TransferTime(median_s=statistics.median(each), count=len(each)) for name, each in lengths.items()}


def _of(steps: Sequence[MeasuredStep], what: Callable[[MeasuredStep], float]) -> float:
    return statistics.median(what(step) for step in steps) if steps else 0.0


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of them does not exceed, to the nearest one."""
    return sorted(values)[round(share * (len(values) - 1))] if values else None
