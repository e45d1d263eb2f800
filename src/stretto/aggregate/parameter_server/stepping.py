"""Training with servers that step: workers push gradients and pull values, and wait for each other as little as `sync=` says.

    before_step        g_k of every range of this optimizer      -->    w, s <- U(w, s, g), when the rule of `sync=` is met
                       with the options of its groups, as they are now
    after_step         p <- w, when the rule lets this worker read

The optimizer runs on the servers, its state is there, and `optimizer.step()` of the loop updates nothing itself. Gradients
are this worker's own until they are pushed: clipping, accumulating under `no_sync` and looking at `p.grad` are as ever. There
is no collective in the loop. One slow worker holds up nobody beyond what `sync=` says; for the same reason buffers (the
statistics of BatchNorm) stay each worker's own, and nobody compares learning rates.

Rates are those of single gradients. With `StaleSynchronous` and `Asynchronous` each of P workers' gradients is a step of its own,
so P workers go P steps where one worker on the whole batch goes one: divide the rate, as with any asynchronous SGD. `SoftSync`
and `BackupWorkers` step by means. `stretto.weight` counts in these means, and nowhere else.

A parameter that got no gradient counts as if it had zeros: a range is updated as a whole. (Momentum and weight decay go on for
it, where torch would leave the parameter alone.)

Precision: gradients travel as float32, or as a codec writes them (`push_encoding.py`), and values and state are kept in float32
on the servers. A parameter in half precision gets the rounded values; its unrounded ones stay on the servers, and in what
`stretto.save` writes.

With a schedule that orders, ranges are pushed and pulled in the order in which the forward first reads them (`use_order.py`).
Across the barrier `optimizer.step()` returns while its pushes wait for their turn, and a module's forward waits for the values of
its own parameters. Nothing is pushed during backward: until `step()` gradients are the program's, to be clipped or added to.

With `BackupWorkers` a worker that has taken t steps waits for version t of each range, and no longer: one that has fallen behind
goes on from the current version at once. What it pushed late was discarded. One that came back counts from the lowest version
that it found. So nobody ever waits in a circle, although some ranges may be ahead of others: of the workers that wait, let w have
the least t. It waits for a range whose version is at most t - 1. Every other worker has computed its last gradient of that range
on a version that is no lower than w's own t - 1, hence on this very one. With w's gradient all are in, so the update is complete.
(To wait for a version after the one that was pushed on would not do: two workers can wait for each other's gradient of two
ranges, if each pushed too late on the other's.)

How the model gets to the servers, and what of it is saved, is in `model_on_servers.py`.

Invariant: the values that a worker computes on are those of one version of each range, the version travels with the gradient, and
           nobody but the servers changes them: a parameter that was written to since the last step is refused.
Cost:      m bytes up, or what a codec makes of them, and m down in each step; one flat copy of the model and one of its gradients
           in the worker's memory.
Reference: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
Departs:   a worker pulls as soon as it has pushed, and waits at the end of its step, where the paper pulls before the next one.
           It is the same wait, for nothing is computed in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.admission import check_compression
from stretto.aggregate.parameter_server import stepping_admission as admission
from stretto.aggregate.parameter_server.client import Push
from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.layout import ParameterRange
from stretto.aggregate.parameter_server.model_on_servers import ModelOnServers
from stretto.aggregate.parameter_server.network import number_dedicated
from stretto.aggregate.parameter_server.step_under_way import (
    Step,
    check_finite,
    flat_gradient,
    is_looked_at,
    optimizer_of,
)
from stretto.aggregate.parameter_server.training import check_codec, clients_of, servers_of
from stretto.aggregate.parameter_server.use_order import check_schedule
from stretto.engine import misuse
from stretto.engine.bucket import Bucket
from stretto.engine.training import NOBODY, Named, RoundEnd, RoundResult, Setting
from stretto.job import Job
from stretto.sync.backup_workers import BackupWorkers

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class SteppingServers(ModelOnServers):
    """`ParameterServer` + `StaleSynchronous`, `Asynchronous`, `SoftSync` or `BackupWorkers` + `Replicated`."""

    goes_on_without = True
    plans_with_times = False

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self.no_join = (
            f"sync={self._sync!r}: there are no rounds that a worker without data could take part in, and the servers wait for "
            f"its gradients as the answer says"
        )
        self.waits_before_use = self.watches_first = self.engaged and strategy.schedule.cross_barrier
        self._crosses = False  # not in the first steps: it is watched who reads what
        self._unsettled: list[Step] = []
        self._under_way: dict[int, Step] = {}  # by optimizer
        self._has_seen_gradients = False

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        check_codec(strategy, steps=True)
        check_schedule(strategy)
        admission.check_answers(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        servers_of(strategy).num_servers(len(clients_of(strategy, job)), number_dedicated(job))
        admission.check(model, optimizers, strategy, job.world_size)
        check_compression(model, optimizers, strategy)

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        is_first = self._service is None
        buckets = super().arrange(dense, sparse)
        if not is_first:
            self._crosses |= self.wants_arranging
            self.wants_arranging = False
        return buckets

    def _end_service(self) -> None:
        super()._end_service()
        self._under_way.clear()
        self._unsettled.clear()

    # -- no rounds ----------------------------------------------------------------------------------------------------

    def bucket_ready(self, bucket: Bucket) -> None:
        raise AssertionError("there are no buckets")

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        return RoundResult(combined=False)

    # -- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        number, entries = self._look(optimizer)
        ranges = [each for each in self._ranges if optimizer_of(each) == number]
        self._under_way[number] = self._begin_step(number, ranges, flat_gradient(entries))
        self._under_way[number].wait_for(entries)
        self._has_seen_gradients |= any(each.parameter.grad is not None for each in entries)
        return NOBODY

    def _look(self, optimizer: Optimizer) -> tuple[int, list[KeptParameter]]:
        """Which optimizer it is and what it steps, if it may."""
        self._job.check_usable()
        if self._broken is not None:
            raise self._broken
        number = admission.number_of(optimizer, self._optimizers, self._setting.name)
        if number in self._under_way:
            self._finish(number)  # what no forward has asked for, or a step that ended in an exception
        entries = [each for each in self._inventory.entries if each.optimizer == number]
        admission.check_step(optimizer, entries, self._written, self._setting, self._weight)
        check_finite(entries if self._setting.check_finite else self._encoding.compressed(entries), self._job.rank)
        return number, entries

    @property
    def _weight(self) -> float:
        """How much this worker's gradients count in a mean."""
        return self._job.weight

    def _begin_step(self, number: int, ranges: Sequence[ParameterRange], gradient: Tensor) -> Step:
        assert self._service is not None
        base, groups, clock = self._inventory.bases[number], self._optimizers[number].param_groups, self._clocks[number]
        options = [base.options_of(group) for group in groups]
        newer_than = clock - self._ahead_of_versions[number] if isinstance(self._sync, BackupWorkers) else -1
        begin = self._bounds[ranges[0].index][0] if ranges else 0
        begin_ns, turns, num_bytes = time.perf_counter_ns(), self._order.turns(ranges), 0
        pushes, pulls, versions = [], [], [self._versions[each.index] for each, _ in turns]
        for (each, urgency), version in zip(turns, versions, strict=True):
            start, stop = self._bounds[each.index]
            part, group = gradient[start - begin : stop - begin], options[int(each.group.split(".")[1])]
            payload, drawn = self._encoding.payload(each, part, clock, self._rounds_before + clock)
            push = Push(each.index, clock, payload, group, version, self._weight, urgency, drawn)
            num_bytes += memoryview(payload).nbytes + self._bytes_down(each)
            pushes.append(self._service.request(push))
            pulls.append(self._pull(each, clock + 1, newer_than, urgency))
        self._clocks[number] += 1
        return Step(clock, [each for each, _ in turns], versions, pushes, pulls, begin_ns, num_bytes)

    def after_step(self, optimizer: Optimizer) -> None:
        for number, given in enumerate(self._optimizers):
            if given is optimizer and number in self._under_way:
                if self._crosses and not is_looked_at(optimizer):
                    step = self._under_way[number]
                    step.when_pulled(partial(self._trace, number, step))
                else:
                    self._finish(number)
        self.wants_arranging = self.watches_first and not self._crosses and self._has_seen_gradients

    def _finish(self, number: int) -> None:
        step = self._under_way[number]
        self._take_values(step, list(step.waiting))
        if not self._crosses:
            self._trace(number, step)
        self._end_step(number)

    def _finish_all(self) -> None:
        for number in list(self._under_way):
            self._finish(number)

    def _end_step(self, number: int) -> None:
        step = self._under_way.pop(number)
        step.count_held(self._job.ledger)
        self._unsettled.append(step)
        self._settle()

    def _trace(self, number: int, step: Step) -> None:
        if (tracer := self._job.tracer) is not None:
            names = ", ".join(each.name for each in self._inventory.entries if each.optimizer == number)
            step.trace(tracer, f"servers {number}", names)

    # -- values that are on their way ---------------------------------------------------------------------------------

    def before_use(self, parameters: Iterable[Tensor]) -> None:
        parameters = list(dict.fromkeys(parameters))
        self._order.used(parameters)
        if self._under_way and self._broken is not None:
            raise self._broken
        for number, step in list(self._under_way.items()):
            self._take_values(step, [parameter for parameter in parameters if parameter in step.waiting])
            if not step.waiting:
                self._end_step(number)

    def is_stale(self, parameter: Tensor) -> bool:
        return any(parameter in step.waiting for step in self._under_way.values())

    def before_load(self) -> None:
        if self._broken is None:
            self._finish_all()
        self._under_way.clear()

    def _take_values(self, step: Step, parameters: Sequence[Tensor]) -> None:
        """Wait for the values of these parameters, which then have them. Until it has ended nothing has changed."""
        places = sorted({place for parameter in parameters for place in step.waiting[parameter]})
        pulls = [step.pulls[place] for place in places]
        if not self._crosses or not all(pull.done() and pull.exception() is None for pull in pulls):
            self._wait([*pulls, *(push for push in step.pushes if push.done())], "for the values after a step")
        for parameter in parameters:
            if self._written[parameter] != parameter._version:
                raise misuse.changed_before_update(tuple(parameter.shape))
        for place, pull in zip(places, pulls, strict=True):
            self._versions[step.ranges[place].index] = pull.result().version
        self._copy([self._entry_of[parameter] for parameter in parameters])
        for parameter in parameters:
            del step.waiting[parameter]

    def _settle(self) -> None:
        """Count the staleness of steps that the servers have applied: of a step the largest of its ranges. A range that came too
        late, or was sent twice because a server died, does not count; what was left out of it when it was written, does again."""
        waiting = []
        for step in self._unsettled:
            self._encoding.settle(step.clock, step.told())
            if not all(push.done() for push in step.pushes):
                waiting.append(step)
                continue
            taken = [push.result() for push in step.pushes]
            stale = [each.version - 1 - read for each, read in zip(taken, step.versions, strict=True) if each.applied]
            if stale:
                self._job.ledger.count_round(staleness=max(stale))
        self._unsettled = waiting
