"""How long a training step takes with a given plan of transfers: list scheduling over two resources, computation and link.

A step is followed from the beginning of one backward to the beginning of the next:

    compute   backward; then updates and the modules of the next forward, in their order
    link      transfers, one part at a time

    a transfer    is ready when its last gradient is (`ready_s`), or when backward ends if the plan is not `early`
    the link      takes the most urgent part that is ready, and is never idle while one is; what it has taken, up to
                  `credit_bytes`, is not overtaken any more. Without a limit on that it is first come, first served
    a part        of n bytes takes n (wire_ratio b + encode_s_per_byte), and a start-up: `start_s` for the first one of a
                  transfer, `part_start_s` for each further one, by default a tenth of that, because later parts follow in the
                  pipeline that the first one has opened
    forward       with `cross_barrier` each module waits for the transfers with parameters that it is the first to read, then
                  their update runs (`update_s` shared out by bytes), then the module. Otherwise all transfers, the whole update,
                  and all modules follow each other. What no module was seen to read is waited for before the first one
    modules       time of forward that the profile gives to no module (activations, loss) is shared out in proportion

No part is left when the next backward begins, since forward has waited for all: so every step is like the first one, its length
is the iteration time T of the steady state, and nothing has to be averaged. With N seconds of transfers and C of computation,

    rho = N / C     U = C / T     alpha = (N + C - T) / min(N, C)     E = (UB - T) / (UB - LB),  UB = N + C,  LB = max(N, C)

With two resources E, TicTac's efficiency, is alpha. Both are 1 where there is nothing to overlap (UB = LB).

Cost:      O(parts log transfers).
Invariant: max(N, C) <= T <= N + C, so alpha and E are in [0, 1]. Crossing the barrier is never slower. With the barrier the
           order of transfers does not change T: a link that is never idle while something is ready ends at the same time in any
           order.
Reference: Hashemi, Jyothi and Campbell, "TicTac", MLSys 2019 (the measures).
Departure: encoding and decoding hold the link; in a job they overlap with other transfers where a processor is free for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.transfers import Transfer, TransferPlan

PART_SHARE = 0.1  # the start-up of a further part, as a share of that of a transfer
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
        """The share of what could overlap that did."""
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
    """Seconds that a part occupies the link, and its bytes there."""

    start_s: float
    part_start_s: float
    per_byte_s: float
    wire_ratio: float

    def seconds(self, number: int, num_bytes: int) -> float:
        return (self.part_start_s if number else self.start_s) + num_bytes * self.per_byte_s


def simulate(
    profile: StepProfile,
    plan: TransferPlan,
    *,
    cross_barrier: bool,
    wire_ratio: float = 1.0,
    encode_s_per_byte: float = 0.0,
    cost: TransferCost | None = None,
    part_start_s: float | None = None,
    steps: int = 2,
) -> Simulated:
    """The step that this plan gives. `wire_ratio`: bytes on the wire for each byte of gradient; `cost`: of another network than
    the profile's."""
    cost = profile.cost if cost is None else cost
    further_s = PART_SHARE * cost.start_s if part_start_s is None else part_start_s
    numbers = {"wire_ratio": wire_ratio, "encode_s_per_byte": encode_s_per_byte, "part_start_s": further_s}
    for name, value in numbers.items():
        if not 0 <= value < inf:
            raise ConfigurationError(f"simulate({name}={value!r}): it is a finite number of at least 0. Leave it out if unknown.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"simulate(steps={steps!r}): a timeline has at least one step. Write for instance steps=2.")
    part_cost = PartCost(cost.start_s, further_s, wire_ratio * cost.per_byte_s + encode_s_per_byte, wire_ratio)
    on_link = list(carry(plan, transfer_ready_s(profile, plan), part_cost))
    on_compute = list(_compute(profile, plan, on_link, cross_barrier))
    period = on_compute[-1].end_s
    once = sorted(on_compute + on_link, key=lambda span: (span.begin_s, span.end_s))
    return Simulated(
        iteration_s=period,
        communication_s=sum(span.end_s - span.begin_s for span in on_link),
        computation_s=profile.backward_s + profile.update_s + profile.forward_s,
        steps=steps,
        timeline=tuple(_later(span, number * period) for number in range(steps) for span in once),
    )


def _later(span: SimulatedSpan, seconds: float) -> SimulatedSpan:
    return msgspec.structs.replace(span, begin_s=span.begin_s + seconds, end_s=span.end_s + seconds)


def transfer_ready_s(profile: StepProfile, plan: TransferPlan) -> list[float]:
    """When each transfer of the plan may begin, from the beginning of backward and not after its end."""
    seen = {parameter.name: parameter.ready_s for parameter in profile.parameters}
    end = profile.backward_s
    if not plan.early:
        return [end] * len(plan.transfers)
    return [min(end, max((seen.get(name, end) for name in one.parameters), default=end)) for one in plan.transfers]


class QueuedPart(msgspec.Struct, frozen=True):
    """A part that the link has taken."""

    transfer: int
    number: int
    count: int
    num_bytes: int


def carry(plan: TransferPlan, ready_s: Sequence[float], cost: PartCost) -> Iterator[SimulatedSpan]:
    """What is on the link and when, until all parts of all transfers have been."""
    arrivals = deque(sorted(range(len(ready_s)), key=lambda number: (ready_s[number], number)))
    parts = [deque(_parts(number, transfer)) for number, transfer in enumerate(plan.transfers)]
    waiting: list[tuple[int, float, int]] = []  # transfers that are ready and have parts left, the most urgent in front
    taken: deque[QueuedPart] = deque()
    credit = inf if plan.credit_bytes is None else max(plan.credit_bytes, 1)
    now = 0.0

    def let_in(until_s: float, in_flight: float) -> None:
        """Transfers that become ready until then; whatever credit is left for is taken, in the order of urgency."""
        while True:
            while waiting and in_flight < credit:
                number = waiting[0][-1]
                taken.append(parts[number].popleft())
                in_flight += taken[-1].num_bytes * cost.wire_ratio
                if not parts[number]:
                    heapq.heappop(waiting)
            if not arrivals or ready_s[arrivals[0]] > until_s:
                return
            moment = ready_s[arrivals[0]]
            while arrivals and ready_s[arrivals[0]] == moment:
                number = arrivals.popleft()
                heapq.heappush(waiting, (plan.transfers[number].priority, moment, number))

    while arrivals or waiting or taken:
        let_in(now, _wire_bytes(taken, cost))
        if not taken:
            now = ready_s[arrivals[0]]
            continue
        part = taken.popleft()
        end = now + cost.seconds(part.number, part.num_bytes)
        let_in(end, _wire_bytes([part, *taken], cost))
        what = f"transfer {part.transfer}" + (f", part {part.number + 1} of {part.count}" if part.count > 1 else "")
        yield SimulatedSpan(LINK, what, now, end, part.transfer, part.num_bytes)
        now = end


def _wire_bytes(parts: Sequence[QueuedPart] | deque[QueuedPart], cost: PartCost) -> float:
    return sum(part.num_bytes for part in parts) * cost.wire_ratio


def _parts(number: int, transfer: Transfer) -> list[QueuedPart]:
    """A transfer of no bytes is a part too: it has a start-up."""
    each = transfer.part_bytes or max(transfer.num_bytes, 1)
    sizes = [min(each, transfer.num_bytes - begin) for begin in range(0, transfer.num_bytes, each)] or [0]
    return [QueuedPart(number, place, len(sizes), size) for place, size in enumerate(sizes)]


def _compute(
    profile: StepProfile, plan: TransferPlan, on_link: Sequence[SimulatedSpan], cross_barrier: bool
) -> Iterator[SimulatedSpan]:
    """Backward, then what the processor does of the next step's forward, and when."""
    end_s = {span.transfer: span.end_s for span in on_link}  # of its last part
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
