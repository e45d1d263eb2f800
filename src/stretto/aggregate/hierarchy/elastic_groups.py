"""Elastic averaging among groups: each trains by itself, and now and then it and a center on the servers move to each other.

    backward        p.grad <- the mean over the group                                     all-reduce inside
    before_step     in every `every`-th step: x~ is pulled, and  d_i = rate (x_i - x~)    by the group's first worker
    step            x_i <- U(x_i, g)                                                      every worker's own optimizer
    after_step      in these steps:  x_i <- x_i - d_i,  x~ <- x~ + d_i                    the first worker pushes d_i

With SGD that is x_i - eta g - rate (x_i - x~), gradient and difference both at the x_i of before. What a group loses the center
gains, to the rounding of one addition each: sum_i x_i + x~ is changed by gradients alone.

    sync=Synchronous()            all groups pull the same x~, and their differences are added in the order of groups
    sync=StaleSynchronous(s)      nobody is more than s exchanges ahead of the slowest
    sync=Asynchronous()           nobody waits for anybody

While training the model is the group's own x_i. The result is x~: `stretto.save`, and distributing anew, have all groups take it
and go on from there; `stretto.release` leaves it in the model. (Not where the program has written values of its own since the
last step.) Optimizer state is each group's own; a checkpoint has that of rank 0's.

Invariant: all workers of a group hold the same bits after each step.
Cost:      in every `every`-th step m bytes up and m down for each group, and a broadcast inside; m more memory in each worker.
Failure:   as with servers that step (`stepping_servers.py`).
Reference: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NIPS 2015; Mamidala et al., "MXNET-MPI",
           arXiv:1801.03855, for groups.
Departs:   a group waits until the center has taken its difference, so that whoever reads the center when all have come to a
           checkpoint reads all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.hierarchy import group_admission as admission
from stretto.aggregate.hierarchy.center import Center
from stretto.aggregate.hierarchy.from_first import FromFirst
from stretto.aggregate.hierarchy.group_rounds import GroupRounds
from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.network import network_of, number_dedicated
from stretto.aggregate.parameter_server.server_record import ServerLedger
from stretto.aggregate.parameter_server.step_under_way import check_finite
from stretto.aggregate.parameter_server.stepping_admission import refuse_change
from stretto.aggregate.parameter_server.training import clients_of, servers_of
from stretto.collectives import calls
from stretto.engine.bucket import Bucket
from stretto.engine.training import EVERYBODY, Named, Setting
from stretto.errors import PeerLost, StrettoError
from stretto.job import Job
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy

log = logging.getLogger("stretto.parameter_server")


class ElasticGroups(GroupRounds):
    """`Hierarchy(outer=ParameterServer(), elastic=Elastic(...))` + `Synchronous`, `StaleSynchronous` or `Asynchronous` +
    `Replicated`."""

    goes_on_without = True

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._strategy, self._job, self._setting = strategy, job, setting
        self._optimizers = setting.loop.optimizers
        self.engaged = job.world_size > 1
        self.no_join = f"aggregate={strategy.aggregate!r}: a group's steps are its own, and no other group takes part in them"
        self._clients = clients_of(strategy, job)
        elastic = admission.elastic_of(strategy)
        self._every, self._rate = elastic.every, elastic.rate_for(len(self._clients))
        self._from_first = FromFirst(self._within, f"the center of {setting.name}")
        self._network = network_of(job, servers_of(strategy), len(self._clients)) if self.engaged else None
        self._named: list[Named] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._entries: list[KeptParameter] = []
        self._center: Center | None = None
        self._steps = [0] * len(self._optimizers)
        self._differences: dict[int, Tensor] = {}  # by optimizer, between the beginning of a step and its end
        self._written: dict[Tensor, int] = {}  # autograd's count of writes to each parameter, after the last step
        self._is_at_center = False  # `before_release` has left it in the model

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_answers(strategy)
        admission.check_elastic_sync(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        num_groups = len(clients_of(strategy, job))
        servers_of(strategy).num_servers(num_groups, number_dedicated(job))
        admission.elastic_of(strategy).rate_for(num_groups)
        admission.check_elastic_model(model, optimizers)

    # -- what is served -----------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        place = {name: number for number, (name, _) in enumerate(self._setting.model.named_parameters())}
        named = sorted((*dense, *sparse), key=lambda each: place[each[0]])
        if self._center is None:
            self._named, self._dtypes = named, {name: parameter.dtype for name, parameter in named}
            self._entries = _entries_of(named, self._optimizers)
            self._serve()
        else:
            refuse_change(self._setting.name, self._named, self._dtypes, named)
        return self._arrange_inside(dense, sparse)

    def _serve(self) -> None:
        """The center begins with what all workers have. All of them call it together."""
        assert self._network is not None
        sync = StaleSynchronous(0) if isinstance(self._strategy.sync, Synchronous) else self._strategy.sync
        replicas = servers_of(self._strategy).replicas
        center = Center(self, self._setting.name, self._job, self._network, self._entries, sync, self._clients, replicas)
        problem = None
        if self._job.rank == 0:
            try:
                center.fill()
            except StrettoError as error:
                problem = str(error)
        problem = self._job.gather_object(problem)[0]
        if problem is not None:
            raise StrettoError(f"the servers could not begin with {self._setting.name}: {problem}")
        self._center, self._is_at_center = center, False
        self._steps = [0] * len(self._optimizers)
        self._note_written(self._entries)

    def _lose_group(self, lost: PeerLost) -> None:
        if self._center is not None:
            self._center.end(lost)

    # -- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        self._job.check_usable()
        number = self._number_of(optimizer)
        admission.refuse_deciding_by_loss(optimizer)
        entries = [] if number is None else self._of(number)
        if self._setting.check_finite and self._inside is None:
            check_finite(entries, self._job.rank)
        if number is not None and (self._steps[number] + 1) % self._every == 0 and entries:
            begin = entries[0].start
            center = self._pull(number)
            difference = torch.empty_like(center)
            for each in entries:
                difference[each.start - begin : each.stop - begin].copy_(each.parameter.detach().reshape(-1))
            self._differences[number] = difference.sub_(center).mul_(self._rate)
        return EVERYBODY

    def after_step(self, optimizer: Optimizer) -> None:
        number = self._number_of(optimizer)
        if number is None:
            return
        entries, difference = self._of(number), self._differences.pop(number, None)
        self._steps[number] += 1
        self._is_at_center = False
        if difference is not None:
            begin = entries[0].start
            with torch.no_grad():
                for each in entries:
                    part = difference[each.start - begin : each.stop - begin].view(each.parameter.shape).to(each.parameter.device)
                    each.parameter.copy_(each.parameter.to(torch.float32).sub(part))
            if self._is_first:
                assert self._center is not None
                self._center.add(number, difference)
        self._note_written(entries)

    def _number_of(self, optimizer: Optimizer) -> int | None:
        """None: it was not given to `distribute`. What it does to a group's own values is that group's affair."""
        return next((number for number, given in enumerate(self._optimizers) if given is optimizer), None)

    def _of(self, number: int) -> list[KeptParameter]:
        return [each for each in self._entries if each.optimizer == number]

    def _pull(self, number: int) -> Tensor:
        """What the center has for this optimizer's parameters, the same for all workers of the group."""
        assert self._center is not None
        entries = self._of(number)
        part = self._center.values[entries[0].start : entries[-1].stop] if entries else self._center.values[:0]
        with self._from_first.telling(part):
            if self._is_first:
                self._center.pull(number)
        with self._in_group():
            self._from_first.give(part)
        return part

    def _note_written(self, entries: Iterable[KeptParameter]) -> None:
        for each in entries:
            self._written[each.parameter] = each.parameter._version

    # -- the result ---------------------------------------------------------------------------------------------------

    @property
    def _is_untouched(self) -> bool:
        """Whether nobody has written to the parameters since the last step."""
        return all(self._written.get(each.parameter) == each.parameter._version for each in self._entries)

    def _take(self, values: Tensor) -> None:
        with torch.no_grad():
            for each in self._entries:
                each.parameter.copy_(values[each.start : each.stop].view(each.parameter.shape))
        self._note_written(self._entries)

    def _meet_at_center(self) -> None:
        """All groups do. Nobody has anything under way: each has waited until the center had its difference."""
        assert self._center is not None
        for number in range(len(self._optimizers)):
            self._pull(number)
        self._take(self._center.values)

    def server_ledgers(self) -> dict[int, ServerLedger]:
        """What the servers have counted of the center; nothing where there is one worker and no server."""
        return {} if self._center is None else self._center.ledgers()

    def before_save(self) -> None:
        if self._center is not None:
            self._meet_at_center()

    def before_release(self) -> None:
        if self._center is None:
            return
        mine = self._is_untouched
        if mine if self._within.size == 1 else all(calls.gather_object(self._within, mine)):
            self._meet_at_center()
        self._is_at_center = True

    def begin_anew(self) -> None:
        if self._center is not None:
            self._center.end()
            self._serve()

    def close(self) -> None:
        super().close()
        center, self._center = self._center, None
        if center is None or self._job.closed:
            return
        try:
            if not self._is_at_center and self._is_untouched:
                self._take(center.read())
        except StrettoError as problem:
            log.warning("%s keeps the values of this worker's group, for the center is lost: %s", self._setting.name, problem)
        center.end()


def _entries_of(named: Sequence[Named], optimizers: Sequence[Optimizer]) -> list[KeptParameter]:
    """Where each parameter lies in the center: those of an optimizer together."""
    entries: list[KeptParameter] = []
    stop = 0
    for number, optimizer in enumerate(optimizers):
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        mine -= {each.parameter for each in entries}
        for name, parameter in named:
            if parameter in mine:
                start, stop = stop, stop + parameter.numel()
                entries.append(KeptParameter(name, parameter, number, str(number), start, stop))
    return entries
