"""How long a training step takes with a given plan of transfers: list scheduling over two resources, computation and link.

A step is followed from the beginning of one backward to the beginning of the next:

    compute   backward; then updates and the modules of the next forward, in their order
    link      transfers, one part at a time

    a transfer    is ready when its last gradient is (`ready_s`), or when backward ends if the plan is not `early`
    a part        of n bytes passes the link in `hops` messages one after the other: a ring of P workers has 2 (P - 1) of them,
                  and the next cannot leave before the one of the neighbour has come. All workers do the same, so one link stands
                  for all. A message takes (theta + n (wire_ratio b + encode_s_per_byte)) / hops of the link, and (a - theta) /
                  hops until it has been received, in which the link is free for others. So a transfer in one part that has the
                  network to itself takes a + b n, as measured. `part_start_s` is theta, by default a tenth of a
    the link      takes the most urgent message that is ready, and is never idle while one is; what it has taken, up to
                  `credit_bytes`, is not overtaken any more. Without a limit on that it is first come, first served
    messages      at most `MOST_MESSAGES` are followed: of a plan with more, several parts are taken for one
    hops=1        is the model of the papers: the start-up holds the link, with a for the first part of a transfer and theta for
                  each further one, because these follow in the pipeline that the first one has opened
    forward       with `cross_barrier` each module waits for the transfers with parameters that it is the first to read, then
                  their update runs (`update_s` shared out by bytes), then the module. Otherwise all transfers, the whole update,
                  and all modules follow each other. What no module was seen to read is waited for before the first one
    modules       time of forward that the profile gives to no module (activations, loss) is shared out in proportion

No part is left when the next backward begins, since forward has waited for all: so every step is like the first one, its length
is the iteration time T of the steady state, and nothing has to be averaged. With N seconds of transfers and C of computation,

    rho = N / C     U = C / T     alpha = (N + C - T) / min(N, C)     E = (UB - T) / (UB - LB),  UB = N + C,  LB = max(N, C)

With two resources E, TicTac's efficiency, is alpha. Both are 1 where there is nothing to overlap (UB = LB).

Cost:      O(messages log transfers).
Invariant: with one hop max(N, C) <= T <= N + C, so alpha and E are in [0, 1], and with the barrier the order of transfers does
           not change T: a link that is never idle while something is ready ends at the same time in any order. With more hops N
           has no latency in it, and T <= N + C + a for each part. Crossing the barrier is never slower.
Reference: Hashemi, Jyothi and Campbell, "TicTac", MLSys 2019 (the measures).
Departure: encoding and decoding hold the link; in a job they overlap with other transfers where a processor is free for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

import msgspec

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.transfers import Transfer, TransferPlan

PART_SHARE = 0.1  # what a part costs the link or the thread that serves it, as a share of a transfer's start-up
BUFFERED_BYTES = 128 << 10  # beyond the credit: two packets of 64 KiB are as much as Linux queues of a connection at a device
MOST_MESSAGES = 20_000
COMPUTE, LINK = "compute", "link"


class SimulatedSpan(msgspec.Struct, frozen=True):
    """Something that occupied a resource. `transfer` is a number in the plan, for what was on the link."""

    resource: str
    what: str
    begin_s: float
    end_s: float
    transfer: int | None = None
    num_bytes: int = 0


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """The iteration time T, what the link (N) and computation (C) take of it, and the timeline of `steps` steps."""

    iteration_s: float
    communication_s: float
    computation_s: float
    steps: int
    timeline: tuple[SimulatedSpan, ...]

    @property
    def alpha(self) -> float:
        """The share of what could overlap that did. Latency is in T and not in N, so it is below 0 where nothing overlaps."""
        most = min(self.communication_s, self.computation_s)
        return (self.communication_s + self.computation_s - self.iteration_s) / most if most > 0 else 1.0

    @property
    def rho(self) -> float:
        """Communication over computation."""
        if self.computation_s == 0:
            return inf if self.communication_s > 0 else 0.0
        return self.communication_s / self.computation_s

    @property
    def utilisation(self) -> float:
        """U: the share of the time in which the processor computes."""
        return self.computation_s / self.iteration_s if self.iteration_s > 0 else 1.0

    @property
    def efficiency(self) -> float:
        """TicTac's E."""
        upper = self.communication_s + self.computation_s
        lower = max(self.communication_s, self.computation_s)
        return (upper - self.iteration_s) / (upper - lower) if upper > lower else 1.0


@dataclass(frozen=True, slots=True)
class PartCost:
    """Seconds that each message of a part occupies the link, and until it has been received; and its bytes there."""

    start_s: float
    part_start_s: float
    per_byte_s: float
    wire_ratio: float
    hops: int = 1

    def seconds(self, number: int, num_bytes: int) -> float:
        holds_link = self.start_s if self.hops == 1 and number == 0 else self.part_start_s
        return (holds_link + num_bytes * self.per_byte_s) / self.hops

    def on_wire(self, num_bytes: int) -> float:
        """Bytes of a message: in a ring every one has the part of one worker."""
        return num_bytes * self.wire_ratio / (self.hops // 2 + 1)

    @property
    def latency_s(self) -> float:
        return 0.0 if self.hops == 1 else max(0.0, self.start_s - self.part_start_s) / self.hops


def hops_of(profile: StepProfile, cost: TransferCost | None = None) -> int:
    """How many messages of a transfer follow each other: as measured, else in a ring."""
    hops = (profile.cost if cost is None else cost).hops
    return 2 * max(1, profile.world_size - 1) if hops is None else hops


def simulate(
    profile: StepProfile,
    plan: TransferPlan,
    *,
    cross_barrier: bool,
    wire_ratio: float = 1.0,
    encode_s_per_byte: float = 0.0,
    cost: TransferCost | None = None,
    part_start_s: float | None = None,
    hops: int | None = None,
    steps: int = 2,
) -> Simulated:
    """The step that this plan gives. `wire_ratio`: bytes on the wire for each byte of gradient; `cost`: of another network than
    the profile's; `hops`: those that the cost was measured with, or of a ring, unless said otherwise."""
    cost = profile.cost if cost is None else cost
    further_s = PART_SHARE * cost.start_s if part_start_s is None else part_start_s
    numbers = {"wire_ratio": wire_ratio, "encode_s_per_byte": encode_s_per_byte, "part_start_s": further_s}
    for name, value in numbers.items():
        if not 0 <= value < inf:
            raise ConfigurationError(f"simulate({name}={value!r}): it is a finite number of at least 0. Leave it out if unknown.")
    if hops is not None and (isinstance(hops, bool) or not isinstance(hops, int) or hops < 1):
        raise ConfigurationError(f"simulate(hops={hops!r}): a transfer passes the link at least once. Leave it out for a ring.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"simulate(steps={steps!r}): a timeline has at least one step. Write for instance steps=2.")
    hops = hops_of(profile, cost) if hops is None else hops
    bundle = _parts_at_a_time(plan, hops)
    plan, further_s = _in_bundles(plan, bundle), bundle * further_s
    part_cost = PartCost(cost.start_s, further_s, wire_ratio * cost.per_byte_s + encode_s_per_byte, wire_ratio, hops)
    on_link = list(carry(plan, transfer_ready_s(profile, plan), part_cost))
    on_compute = list(_compute(profile, plan, on_link, cross_barrier, part_cost.latency_s))
    period = on_compute[-1].end_s
    once = sorted(on_compute + on_link, key=lambda span: (span.begin_s, span.end_s))
    return Simulated(
        iteration_s=period,
        communication_s=sum(span.end_s - span.begin_s for span in on_link),
        computation_s=profile.backward_s + profile.update_s + profile.forward_s,
        steps=steps,
        timeline=tuple(_later(span, number * period) for number in range(steps) for span in once),
    )


def _parts_at_a_time(plan: TransferPlan, hops: int) -> int:
    parts = sum(1 if one.part_bytes is None else ceil(one.num_bytes / one.part_bytes) for one in plan.transfers)
    return max(1, ceil(parts * hops / MOST_MESSAGES))


def _in_bundles(plan: TransferPlan, parts: int) -> TransferPlan:
    """Parts that are so many times as large."""
    if parts == 1:
        return plan
    transfers = [
        one if one.part_bytes is None else msgspec.structs.replace(one, part_bytes=parts * one.part_bytes)
        for one in plan.transfers
    ]
    return msgspec.structs.replace(plan, transfers=tuple(transfers))


def _later(span: SimulatedSpan, seconds: float) -> SimulatedSpan:
    return msgspec.structs.replace(span, begin_s=span.begin_s + seconds, end_s=span.end_s + seconds)


def transfer_ready_s(profile: StepProfile, plan: TransferPlan) -> list[float]:
    """When each transfer of the plan may begin, from the beginning of backward and not after its end."""
    seen = {parameter.name: parameter.ready_s for parameter in profile.parameters}
    end = profile.backward_s
    if not plan.early:
        return [end] * len(plan.transfers)
    return [min(end, max((seen.get(name, end) for name in one.parameters), default=end)) for one in plan.transfers]


class SimulatedMessage(NamedTuple):
    """One hop of a part; in the order in which messages that are ready leave: by urgency, then by age."""

    priority: int
    ready_s: float
    transfer: int
    number: int  # of the part
    hop: int
    num_parts: int
    num_bytes: int  # of the part


def carry(plan: TransferPlan, ready_s: Sequence[float], cost: PartCost) -> Iterator[SimulatedSpan]:
    """What is on the link and when, until all parts of all transfers have been."""
    coming = [  # (when it is ready, message)
        (ready_s[number], message)
        for number, transfer in enumerate(plan.transfers)
        for message in _first_messages(number, transfer, ready_s[number])
    ]
    heapq.heapify(coming)
    waiting: list[SimulatedMessage] = []
    taken: deque[SimulatedMessage] = deque()
    credit = inf if plan.credit_bytes is None else max(plan.credit_bytes, 1) + (BUFFERED_BYTES if cost.hops > 1 else 0)
    now, in_flight = 0.0, 0.0  # bytes that the link has taken

    def let_in(until_s: float) -> None:
        """Messages that become ready until then; whatever credit is left for is taken, in the order of urgency."""
        nonlocal in_flight
        moment = now
        while moment <= until_s:
            while coming and coming[0][0] <= moment:
                heapq.heappush(waiting, heapq.heappop(coming)[1])
            while waiting and in_flight < credit:
                taken.append(heapq.heappop(waiting))
                in_flight += cost.on_wire(taken[-1].num_bytes)
            moment = coming[0][0] if coming else inf

    while coming or waiting or taken:
        let_in(now)
        if not taken:
            now = coming[0][0]
            continue
        message = taken.popleft()
        end = now + cost.seconds(message.number, message.num_bytes)
        let_in(end)
        in_flight -= cost.on_wire(message.num_bytes)
        yield _span(message, now, end, cost.hops)
        now = end
        if message.hop + 1 < cost.hops:
            next_s = end + cost.latency_s
            heapq.heappush(coming, (next_s, message._replace(hop=message.hop + 1, ready_s=next_s)))


def _first_messages(number: int, transfer: Transfer, ready_s: float) -> list[SimulatedMessage]:
    """The first hop of each part. A transfer without bytes has one part, because it costs a start-up all the same."""
    each = transfer.part_bytes or max(transfer.num_bytes, 1)
    sizes = [min(each, transfer.num_bytes - begin) for begin in range(0, transfer.num_bytes, each)] or [0]
    return [SimulatedMessage(transfer.priority, ready_s, number, place, 0, len(sizes), size) for place, size in enumerate(sizes)]


def _span(message: SimulatedMessage, begin_s: float, end_s: float, hops: int) -> SimulatedSpan:
    """The last hop has the bytes that do not divide."""
    part = f", part {message.number + 1} of {message.num_parts}" if message.num_parts > 1 else ""
    share = message.num_bytes // hops
    num_bytes = share if message.hop + 1 < hops else message.num_bytes - share * (hops - 1)
    return SimulatedSpan(LINK, f"transfer {message.transfer}{part}", begin_s, end_s, message.transfer, num_bytes)


def _compute(
    profile: StepProfile, plan: TransferPlan, on_link: Sequence[SimulatedSpan], cross_barrier: bool, latency_s: float
) -> Iterator[SimulatedSpan]:
    """Backward, then what the processor does of the next step's forward, and when."""
    end_s = {span.transfer: span.end_s + latency_s for span in on_link}  # of its last message
    arrived = {name: end_s[number] for number, transfer in enumerate(plan.transfers) for name in transfer.parameters}
    yield SimulatedSpan(COMPUTE, "backward", 0.0, profile.backward_s)
    now = profile.backward_s
    if not cross_barrier:
        now = max([now, *arrived.values()])
        yield SimulatedSpan(COMPUTE, "update", now, now + profile.update_s)
        now += profile.update_s
    for name, seconds, reads, update_s in _modules(profile, list(arrived)):
        if cross_barrier:
            now = max([now, *(arrived[parameter] for parameter in reads)])
            if update_s > 0:
                yield SimulatedSpan(COMPUTE, f"update {name}", now, now + update_s)
                now += update_s
        yield SimulatedSpan(COMPUTE, f"forward {name}", now, now + seconds)
        now += seconds


def _modules(profile: StepProfile, planned: Sequence[str]) -> Iterator[tuple[str, float, list[str], float]]:
    """For each module its name, its share of forward, the planned parameters that it is the first to read, and the share of the
    update that these are."""
    modules = [(module.name, module.forward_s) for module in profile.modules] or [("", 0.0)]
    measured = sum(seconds for _, seconds in modules)
    seen = {parameter.name: parameter for parameter in profile.parameters}
    reads: list[list[str]] = [[] for _ in modules]
    sizes = [0] * len(modules)
    for name in planned:
        known = seen.get(name)
        user = known.used_by if known is not None and known.used_by is not None else 0
        reads[user].append(name)
        sizes[user] += known.num_bytes if known is not None else 0
    total = sum(sizes)
    for number, (name, seconds) in enumerate(modules):
        share = seconds / measured if measured > 0 else 1 / len(modules)
        update = sizes[number] / total if total > 0 else float(number == 0)
        yield name, profile.forward_s * share, reads[number], profile.update_s * update
