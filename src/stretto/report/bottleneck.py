"""One sentence on what holds the job back, by rules over the figures.

    steps        there is none in the trace
    held         with servers: a fifth of a step is waiting until another worker has pushed, as `sync=` says
    straggler    one rank computes more than 1.15 times as long as the others, and that is what they wait for
    compute      U >= 0.95: whatever the network does, there is little left to gain
    loop         more than a fifth of a step is neither computing nor communicating nor waiting
    servers      a server works on pushes four fifths of the time, and workers wait for more than a tenth of it
    uneven       ranks wait longer for one another than all communication takes, but not always for the same one
    latency      many small transfers: starting them takes longer than their bytes
    network      rho > 1, and what can be hidden is; or rho > 2, where hiding does not help
    overlap      alpha < 0.5: communication and computation take turns
    tail         most of the communication is hidden, and what is left costs more than a twentieth of the step
    nothing      nothing was communicated either

The first that applies, in this order, is the answer.
"""

from __future__ import annotations

import statistics
from collections import Counter

import msgspec

from stretto.observe.quantities import percent, seconds, size
from stretto.plan.planned import PlannedStep
from stretto.report.figures import JobFigures, RankFigures
from stretto.report.steps import MICRO

SLOWER = 1.15
COMPUTE_BOUND = 0.95
IDLE = 0.2
MANY_TRANSFERS = 8
SMALL_BYTES = 64 * 1024  # where a network of 1 Gbit/s needs 0.5 ms for the bytes, about what a collective takes to start
HIDDEN = 0.5
HOPELESS = 2.0
HELD = 0.2
BUSY = 0.8
WAITED = 0.1


class Bottleneck(msgspec.Struct, frozen=True):
    """`kind` is the name of the rule, `sentence` what it says, with the figures behind it."""

    kind: str
    sentence: str


def find_bottleneck(job: JobFigures, planned: PlannedStep | None = None) -> Bottleneck:
    if job.step_s is None or job.utilisation is None:
        why = "no model was given to stretto.distribute, or it never ran"
        return Bottleneck("steps", f"There is no training step in this trace: {why}.")
    slow = _held(job) or _straggler(job)
    if slow is not None:
        return slow
    if job.utilisation >= COMPUTE_BOUND:
        return Bottleneck(
            "compute",
            f"Computation: it takes {percent(job.utilisation)} of a step ({seconds(job.compute_s)} of {seconds(job.step_s)}), so "
            f"a faster network or another schedule gains at most {percent(1 - job.utilisation)}. Only faster computation helps.",
        )
    return _loop(job) or _servers(job) or _uneven(job) or _latency(job, planned) or _network(job, planned)


def _held(job: JobFigures) -> Bottleneck | None:
    """The worker that all others were held back for longest, if that is much."""
    assert job.step_s is not None
    by: Counter[int] = Counter()
    for each in job.servers.workers if job.servers is not None else ():
        if each.held_by is not None:
            by[each.held_by] += round(each.held_s * each.steps / MICRO)
    if not by or job.servers is None:
        return None
    slow = by.most_common(1)[0][0]
    held = statistics.median([each.held_s for each in job.servers.workers if each.rank != slow] or [0.0])
    if held <= HELD * job.step_s:
        return None
    return Bottleneck(
        "held",
        f"Waiting for rank {slow}: until it has pushed, servers hold the other workers back for {seconds(held)} of a step of "
        f"{seconds(job.step_s)} ({percent(held / job.step_s)}), as `sync=` says. If it is always the slow one, write `SoftSync` "
        f"or `BackupWorkers`, which wait for nobody in particular; if workers are slow in turn, `StaleSynchronous` with a larger "
        f"bound.",
    )


def _servers(job: JobFigures) -> Bottleneck | None:
    assert job.step_s is not None
    if job.servers is None or not job.servers.servers or job.wait_s <= WAITED * job.step_s:
        return None
    worst = max(job.servers.servers, key=lambda server: server.busy)
    if worst.busy < BUSY:
        return None
    return Bottleneck(
        "servers",
        f"The servers: server {worst.server} works on pushes {percent(worst.busy)} of the time (its optimizer "
        f"{percent(worst.optimizer)}), and workers wait {seconds(job.wait_s)} of a step of {seconds(job.step_s)}. "
        f"Use more of them (`shards=`), where there are processors to spare.",
    )


def _straggler(job: JobFigures) -> Bottleneck | None:
    """One rank is slower than the others, and that is most of what they wait for (and not the network)."""
    ranks = [rank for rank in job.ranks if rank.num_steps]
    if len(ranks) < 2:
        return None
    slow = max(ranks, key=lambda rank: rank.compute_s)
    others = [rank for rank in ranks if rank is not slow]
    usual = statistics.median(rank.compute_s for rank in others)
    waited = statistics.median(rank.wait_s for rank in others)
    longer = slow.compute_s - usual
    if usual <= 0.0 or slow.compute_s <= SLOWER * usual or not waited / 2 <= longer <= waited * 2:
        return None
    return Bottleneck(
        "straggler",
        f"Rank {slow.rank}: it computes {seconds(slow.compute_s)} a step and the others {seconds(usual)} "
        f"({slow.compute_s / usual:.2f} times as long), so they wait {seconds(waited)} a step. "
        f"Give it a smaller batch (see stretto.weight), or find out what else its machine does.",
    )


def _loop(job: JobFigures) -> Bottleneck | None:
    def share(rank: RankFigures) -> float:
        return rank.other_s / rank.step_s if rank.num_steps else 0.0

    worst = max(job.ranks, key=share)
    if share(worst) <= IDLE:
        return None
    return Bottleneck(
        "loop",
        f"The training loop: rank {worst.rank} spends {percent(share(worst))} of a step ({seconds(worst.other_s)} of "
        f"{seconds(worst.step_s)}) neither computing nor communicating nor waiting for others. "
        f"Look at what runs between the calls: loading data (num_workers of the DataLoader), logging, copies.",
    )


def _uneven(job: JobFigures) -> Bottleneck | None:
    assert job.step_s is not None
    if job.late_s <= max(job.network_s, (1 - COMPUTE_BOUND) * job.step_s):
        return None
    return Bottleneck(
        "uneven",
        f"Uneven steps: a rank waits {seconds(job.late_s)} of a step of {seconds(job.step_s)} "
        f"({percent(job.late_s / job.step_s)}) with nothing on its way, for whoever is late this time; all communication takes "
        f"{seconds(job.network_s)}. Make batches cost the same on all ranks, or see whether workers share processors.",
    )


def _latency(job: JobFigures, planned: PlannedStep | None) -> Bottleneck | None:
    """Where a profile says what a start and a byte cost it decides; otherwise the size does."""
    if job.num_transfers < MANY_TRANSFERS:
        return None
    mean = job.transfer_bytes / job.num_transfers
    if planned is not None and planned.profile is not None:
        count, cost = len(planned.plan.transfers), planned.profile.cost
        if count < MANY_TRANSFERS or count * cost.start_s <= planned.plan.num_bytes * cost.per_byte_s:
            return None
    elif mean >= SMALL_BYTES:
        return None
    what = "transfers" if job.transfers else "messages"
    return Bottleneck(
        "latency",
        f"Latency: a step has {job.num_transfers:.0f} {what} of {size(mean)} on average, so starting them takes longer than "
        f"their bytes. Merge them: `schedule=Merged()`, or `Buckets(bytes)` with more bytes.",
    )


def _network(job: JobFigures, planned: PlannedStep | None) -> Bottleneck:
    assert job.step_s is not None
    overlap, rho = job.overlap, job.network_to_compute
    if overlap is None or rho is None:
        return Bottleneck(
            "nothing",
            f"Nothing that the trace shows: a step of {seconds(job.step_s)} computes {seconds(job.compute_s)}, "
            f"waits {seconds(job.wait_s)} and communicates {seconds(job.network_s)}.",
        )
    if rho > HOPELESS or (rho > 1.0 and overlap >= HIDDEN):
        return Bottleneck(
            "network",
            f"The network: a step communicates {seconds(job.network_s)} and computes {seconds(job.compute_s)} (rho {rho:.2f}, "
            f"alpha {overlap:.2f}), so no order of transfers makes it shorter than {seconds(job.network_s)}. Send fewer bytes "
            f"than {size(job.bytes_sent)} a step (`compress=`), or get a faster link.",
        )
    saved = min(job.network_s, job.compute_s, max(0.0, job.step_s - max(job.network_s, job.compute_s)))
    if overlap < HIDDEN:
        return Bottleneck(
            "overlap",
            f"Poor overlap: {seconds(job.network_s)} of communication and {seconds(job.compute_s)} of computation take "
            f"{seconds(job.step_s)} (alpha {overlap:.2f}, rho {rho:.2f}), and hiding it would "
            f"save up to {seconds(saved)}. {_advice(planned)}",
        )
    lost = max(0.0, job.step_s - job.compute_s)
    return Bottleneck(
        "tail",
        f"The rest of the communication: most of it is hidden (alpha {overlap:.2f}, rho {rho:.2f}), and what is not costs "
        f"{seconds(lost)} of a step of {seconds(job.step_s)} ({percent(lost / job.step_s)}). {_advice(planned)}",
    )


def _advice(planned: PlannedStep | None) -> str:
    if planned is not None and "cross_barrier=True" in planned.plan.schedule:
        return "The schedule overlaps across the barrier already: smaller parts, or fewer bytes (`compress=`), are what is left."
    return "Let transfers run under the next forward too: `schedule=Priority(cross_barrier=True)`."
