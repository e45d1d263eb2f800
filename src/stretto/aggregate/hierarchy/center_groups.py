"""Groups that train by themselves and meet at a center on the servers: what all of these ways to train have in common.

    arrange         the center begins with what all workers have
    step            every worker's own optimizer; inside a group gradients are all-reduced, so a group's copies are the same bits
    pull, push      by the first worker of a group, which gives the others what it has pulled

When a group meets the center, and what it pushes, is for a class to say that derives from this one. The result is the center:
`stretto.save`, and distributing anew, have all groups take it and go on from there; `stretto.release` leaves it in the model.
(Not where the program has written values of its own since the last step.) Optimizer state is each group's own, and so are
buffers; a checkpoint has those of rank 0, and what the optimizer on the servers remembers.

Failure:   as with servers that step (`stepping_servers.py`). A worker that is a group by itself may come back, and
           goes on from the center.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.hierarchy import group_admission as admission
from stretto.aggregate.hierarchy.center import Center
from stretto.aggregate.hierarchy.from_first import FromFirst
from stretto.aggregate.hierarchy.group_rounds import GroupRounds
from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.network import network_of, number_dedicated
from stretto.aggregate.parameter_server.server_record import ServerLedger
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.stepping_admission import refuse_change
from stretto.aggregate.parameter_server.training import clients_of, servers_of
from stretto.collectives import calls
from stretto.engine.bucket import Bucket
from stretto.engine.training import Named, Setting, TensorsByName, TrainingState
from stretto.errors import PeerLost, StrettoError
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy

log = logging.getLogger("stretto.parameter_server")

VELOCITY: Final = "outer velocity"


class GroupsWithCenter(GroupRounds):
    """See the module's text."""

    goes_on_without = True
    placement = "center"  # what is remembered belongs to the center, so nothing is put into an optimizer's `state_dict`

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(grouped(strategy), job, setting)
        self._strategy, self._job, self._setting = strategy, job, setting
        self._optimizers = setting.loop.optimizers
        self.engaged = job.world_size > 1
        self.no_join = f"aggregate={strategy.aggregate!r}: a group's steps are its own, and no other group takes part in them"
        self._clients = clients_of(strategy, job)
        self._from_first = FromFirst(self._within, f"the center of {setting.name}")
        self._network = network_of(job, servers_of(strategy), len(self._clients)) if self.engaged else None
        self._named: list[Named] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._entries: list[KeptParameter] = []
        self._center: Center | None = None
        self._steps = [0] * len(self._optimizers)
        self._written: dict[Tensor, int] = {}  # autograd's count of writes to each parameter, after the last step
        self._is_at_center = False  # `before_release` has left it in the model
        self._velocity: TensorsByName = {}  # that was loaded, for the servers to begin with

    @property
    @abstractmethod
    def _every(self) -> int:
        """How many steps lie between two meetings of a group and the center."""

    @abstractmethod
    def _sync_of_center(self) -> SyncAnswer:
        """Which groups wait for which."""

    @abstractmethod
    def _optimizer_of_center(self) -> OptimizerSpec:
        """What the servers do with what is pushed."""

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        servers_of(strategy).num_servers(len(clients_of(strategy, job)), number_dedicated(job))
        admission.check_own_model(model, optimizers)

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
        center = Center(
            self, self._setting.name, self._job, self._network, self._entries, self._sync_of_center(), self._clients,
            servers_of(self._strategy).replicas, self._optimizer_of_center(),
        )  # fmt: skip
        self._center, self._is_at_center = center, False
        if self._job.life:
            self._job.first_step = center.clock * self._every
            self._meet_at_center()
        else:
            self._fill(center)
        self._steps = [self._job.first_step] * len(self._optimizers)
        self._note_written(self._entries)

    def _fill(self, center: Center) -> None:
        problem = None
        if self._job.rank == 0:
            try:
                center.fill(self._loaded_velocity())
            except StrettoError as error:
                problem = str(error)
        self._velocity = {}
        problem = self._job.gather_object(problem)[0]
        if problem is not None:
            raise StrettoError(f"the servers could not begin with {self._setting.name}: {problem}")

    def _loaded_velocity(self) -> Tensor | None:
        if not self._velocity:
            return None
        parts = [self._velocity[each.name][VELOCITY].to("cpu", torch.float32).reshape(-1) for each in self._entries]
        return torch.cat(parts)

    def _lose_group(self, lost: PeerLost) -> None:
        if self._center is not None:
            self._center.end(lost)

    # -- for subclasses ---------------------------------------------------------------------------------------------------

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

    def _settle(self) -> None:
        """The center has all that this group has pushed. Here each group has waited for that in its step."""

    def _meet_at_center(self) -> None:
        """All groups do, after all have settled."""
        assert self._center is not None
        for number in range(len(self._optimizers)):
            self._pull(number)
        self._take(self._center.values)

    def server_ledgers(self) -> dict[int, ServerLedger]:
        """What the servers have counted of the center; nothing where there is one worker and no server."""
        return {} if self._center is None else self._center.ledgers()

    def before_save(self) -> None:
        if self._center is not None:
            self._settle()

    @contextmanager
    def result_shown(self) -> Iterator[None]:
        """The center stays in the model: all groups go on from it."""
        if self._center is not None:
            self._meet_at_center()
        yield

    def before_release(self) -> None:
        if self._center is None:
            return
        self._settle()
        self._job.barrier(f" before {self._setting.name} is distributed anew")
        mine = self._is_untouched
        if mine if self._within.size == 1 else all(calls.gather_object(self._within, mine)):
            self._meet_at_center()
        self._is_at_center = True

    def state(self) -> TrainingState:
        steps = max(self._steps, default=0)
        if self.state_text is None or self._center is None:
            return TrainingState(steps, {}, {})
        velocity = self._center.export()[1]
        if velocity is None:
            return TrainingState(steps, {}, {})
        shared = {e.name: {VELOCITY: velocity[e.start : e.stop].view(e.parameter.shape).clone()} for e in self._entries}
        return TrainingState(steps, {}, shared)

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        if not saved:
            return None
        for name, parameter in ((each.name, each.parameter) for each in self._entries):
            value = saved.get(name, {}).get(VELOCITY)
            if not isinstance(value, Tensor) or value.numel() != parameter.numel():
                return f"the {VELOCITY} of parameter {name} is not one number for each of its {parameter.numel()} elements"
        return None

    def load_state(self, state: TrainingState) -> None:
        """The servers begin with it in `begin_anew`, which follows."""
        self._velocity = state.shared

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


def grouped(strategy: Strategy) -> Strategy:
    """Where servers have all workers as clients, each worker is a group by itself."""
    if isinstance(strategy.aggregate, Hierarchy):
        return strategy
    return replace(strategy, aggregate=Hierarchy(outer=servers_of(strategy), group_size=1))
