"""From a few watched rounds to a plan of transfers, the same on all workers.

Schedules that need a profile begin without one, in plain buckets. For `ROUNDS_TO_WATCH` rounds a recorder takes the times of this
worker's modules and gradients; then the workers measure what transfers cost, rank 0's profile is everybody's, and each makes the
plan of it. Equal profiles give equal plans, and the label of every collective has a digest of the arrangement, so workers that
differed would find out at once.

A model whose graph changes (a branch taken at random, a layer skipped on one worker) does not fit any one plan: a transfer leaves
when its last gradient is there, and one that never comes holds the others of its transfer back until backward has ended. Nothing
waits for ever, but nothing overlaps either. Which parameters had a gradient on which share of the workers is in the notes of
every round. A parameter that is *unsteady*, with a gradient on some workers only or in some rounds only, travels from then on
apart from steady ones. That is decided by the notes, which all workers share, so all arrange anew in the same round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from torch import Tensor

from stretto.aggregate.all_reduce.bucket import OwnerOf, gradients_of, no_owner
from stretto.collectives.group import Group
from stretto.compress.layout import Layout
from stretto.engine.training import Named, Setting
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.plan.planned import PlannedStep, write_planned
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.recorder import StepRecorder
from stretto.plan.simulate import simulate
from stretto.plan.transfer_cost import expected_cost, transfer_cost
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.orders import Buckets

if TYPE_CHECKING:
    from stretto.strategy import Schedule, Strategy

log = logging.getLogger("stretto")
# On one host what overlaps gains nothing, because it takes the processors that compute, and every transfer costs its start-up.
# But what is larger than a processor's cache is read from memory again. (4 workers, 2 processors; 2, 4, 8 and 128 MiB: steps of a
# GPT with 11 MB 169, 159, 154, 154 ms; of an MLP with 34 MB 119, 118, 117, 127 ms.)
ONE_HOST_BYTES: Final = 8 << 20
ROUNDS_TO_WATCH: Final = 4  # the first one warms up
ROUNDS_BETWEEN: Final = 16  # plans, where the graph keeps changing


class BytesOf(NamedTuple):
    """How many bytes a worker sends of a gradient in one round (with servers: sends and gets), and how many it would be if the
    gradient were sent as it is."""

    sent: int
    dense: int


class Planner:
    """One model's plan, and what it is made of."""

    def __init__(self, strategy: Strategy, job: Job, group: Group, algorithm: str, setting: Setting) -> None:
        self._strategy, self._job, self._group, self._algorithm, self._setting = strategy, job, group, algorithm, setting
        self.measure: Callable[[str], TransferCost] = self._measure  # on all workers together, where transfers are all-reduces
        self.bytes_of: Callable[[str, Tensor], BytesOf] = self._bytes_of_sum  # a gradient, where transfers are all-reduces
        self.profile = None if setting.profile is None else self._as_first(setting.profile[0])
        self.plan: TransferPlan | None = None
        self._gradients: list[Gradient] = []  # that the plan is for
        self._rounds = 0  # of which the notes were seen
        self._planned_at = 0
        self._used: dict[str, bool] = {}  # parameter -> whether it had a gradient, when last seen
        self._unsteady: set[str] = set()
        self._found: set[str] = set()  # to become unsteady with the next plan
        watches = strategy.schedule.needs_profile and self.profile is None and job.world_size > 1
        self._rounds_to_watch = ROUNDS_TO_WATCH if watches else 1  # who reads which parameter is seen in one
        self._recorder = StepRecorder(setting.model, setting.loop.optimizers, called=setting.called) if watches else None
        self.is_watching = strategy.schedule.needs_profile or strategy.schedule.cross_barrier

    def _measure(self, what: str) -> TransferCost:
        algorithm = "auto" if self._algorithm == "native" else self._algorithm  # which has no group of its own to measure in
        return transfer_cost(self._group, what, algorithm)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    # -- the plan -----------------------------------------------------------------------------------------------------

    def make(self, dense: Sequence[Named], owner_of: OwnerOf = no_owner) -> TransferPlan:
        """The plan for these parameters."""
        self._gradients = [
            msgspec.structs.replace(each, kind=f"{each.kind} unsteady") if each.name in self._unsteady else each
            for each in gradients_of(dense, self._strategy.compress, owner_of)
        ]
        self.plan = self._planned()
        self.plan.check(self._gradients)
        self._show(self.plan)
        return self.plan

    def is_current(self) -> bool:
        """Whether the same plan would be made now. What `auto` has chosen may be another since."""
        return self.plan is None or not self._follows_choices or self._planned() == self.plan

    def _planned(self) -> TransferPlan:
        return self._schedule().plan(self._gradients, self.profile)

    def _schedule(self) -> Schedule:
        """The user's, with the sizes filled in that are left to us: for links as `auto` has measured them, which are saved and
        loaded with what it chose."""
        schedule = self._strategy.schedule
        if not self._follows_choices:
            return schedule
        assert isinstance(schedule, Buckets)
        if self._takes_processors and schedule.first_bytes is None:
            return Buckets(bytes=ONE_HOST_BYTES, first_bytes=ONE_HOST_BYTES)
        cost = expected_cost(self._group, f"buckets of {self._setting.name}")
        return schedule.sized(self._gradients, self._in_bytes_of_gradients(cost))

    @property
    def _follows_choices(self) -> bool:
        """Whether the plan depends on what `auto` has measured among all workers."""
        schedule, group = self._strategy.schedule, self._group
        without_size = isinstance(schedule, Buckets) and schedule.bytes is None
        return without_size and self._algorithm == "auto" and group.is_world and group.size > 1

    @property
    def _takes_processors(self) -> bool:
        """Whether combining takes the processors that compute, and nothing else: workers of one host, without a GPU."""
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._setting.model.parameters())
        return on_cpu and self._group.workers_per_host == self._group.size

    def _show(self, plan: TransferPlan) -> None:
        """To whoever traces the job."""
        if self._job.rank == 0 and self._job.launch.trace is not None and not self.is_watching:
            predicted = None
            if self.profile is not None:
                predicted = simulate(self.profile, plan, cross_barrier=self._strategy.schedule.cross_barrier).iteration_s
            try:
                write_planned(Path(self._job.launch.trace), PlannedStep(plan=plan, profile=self.profile, predicted_s=predicted))
            except OSError as problem:
                log.error("the plan of %s could not be written beside the traces: %s", self._setting.name, problem)

    # -- what is seen -------------------------------------------------------------------------------------------------

    def round_ended(self, names: Sequence[str], shares: Sequence[float]) -> bool:
        """A round was closed, in which such a share of the workers had a gradient of each parameter. Whether to arrange anew, on
        all workers: they have all seen the same."""
        self._rounds += 1
        self._look_at_use(names, shares)
        if self.is_watching:
            if self._rounds < self._rounds_to_watch:
                return False
            self._end_of_watch()
        elif not self._found or self._rounds < self._planned_at + ROUNDS_BETWEEN or not self._strategy.schedule.needs_profile:
            return False
        elif self._job.tracer is not None:
            what = f"the graph has changed: {len(self._found)} parameters travel apart from now on"
            self._job.tracer.span("plan", what, self._job.tracer.now())
        self._unsteady |= self._found
        self._found.clear()
        self._planned_at = self._rounds
        return True

    def _look_at_use(self, names: Sequence[str], shares: Sequence[float]) -> None:
        for name, share in zip(names, shares, strict=True):
            used = share > 0
            partly = used and share < 1.0 - 0.5 / self._job.world_size
            if name not in self._unsteady and (partly or self._used.get(name, used) != used):
                self._found.add(name)
            self._used[name] = used

    def _end_of_watch(self) -> None:
        """Make a profile of what was recorded. Where there is nothing to make it of, the plan is made without."""
        self.is_watching = False
        if self._recorder is None:
            return
        cost = self._in_bytes_of_gradients(self.measure(f"the schedule of {self._setting.name}"))
        recorded = None
        try:
            recorded = self._recorder.profile(cost=cost, world_size=self._job.world_size)
        except ConfigurationError as problem:
            log.info("%s: no profile (%s)", self._setting.name, problem)
        self.close()
        self.profile = self._as_first(recorded)

    def _as_first(self, profile: StepProfile | None) -> StepProfile | None:
        """Rank 0's. All workers call it."""
        first = self._job.gather_object(None if profile is None else msgspec.to_builtins(profile))[0]
        return None if first is None else msgspec.convert(first, StepProfile)

    def _in_bytes_of_gradients(self, cost: TransferCost) -> TransferCost:
        """The same cost for each byte of a gradient, where others are on the wire: where gradients are compressed."""
        named = [(name, p) for name, p in self._setting.model.named_parameters() if p.requires_grad]
        found = [self.bytes_of(name, parameter) for name, parameter in named]
        sent, dense = sum(each.sent for each in found), sum(each.dense for each in found)
        return cost if not dense or sent == dense else msgspec.structs.replace(cost, per_byte_s=cost.per_byte_s * sent / dense)

    def _bytes_of_sum(self, name: str, parameter: Tensor) -> BytesOf:
        """Codecs whose payloads depend on the values are taken as they are."""
        size = self._group.size
        dense = 2 * parameter.nbytes * (size - 1) // size
        answer = self._strategy.compress.for_parameter(name, tuple(parameter.shape))
        layout = Layout.in_memory([(name, parameter.shape, None)])
        sent = None if answer.lossless else answer.bytes_sent(layout, 0, size)
        return BytesOf(dense if sent is None else sent, dense)
