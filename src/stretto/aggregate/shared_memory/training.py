"""Training on shared weights (Hogwild): parameters are views of one memory, and every worker's optimizer steps them in place.

    arrange          p.data of every parameter <- its place in the memory of all
    forward, step    those of the plain loop: they read and write what everybody reads and writes
    close            p.data <- a copy of this worker's own

There is no lock, no round and no collective in the loop. A worker that dies holds up nobody. What it has written stays; of a
step in the middle of which it was killed, some parameters have it and others not.

Frozen parameters lie there too, so that they may be unfrozen, and are in memory once.

An optimizer has to write into its parameters. One that gives them other memory (`p.data = ...`), and whatever else does so, is
found out at the step: from then on this worker would train alone.

Staleness of a step, in the ledger: the steps that other workers have ended between this worker's first forward since its last
step (or the end of that, where the model's forward was not called) and the end of this step, of the optimizer with the same
place. A step of theirs that was under way at either moment counts as a whole or not at all, so it may be off by one for each of
them, P - 1 at most.

Saving: `stretto.save` writes the shared parameters, the optimizer state of rank 0, and each worker's buffers if they are "local".
All workers are in it, so nobody writes meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.shared_memory.weights import SharedWeights, is_dense
from stretto.engine.bucket import Bucket
from stretto.engine.finite import is_finite
from stretto.engine.stepping import decides_by_loss
from stretto.engine.training import EVERYBODY, Named, RoundEnd, RoundResult, Setting, Training
from stretto.engine.watch import Watch
from stretto.errors import ConfigurationError, NonFiniteGradient
from stretto.job import Job
from stretto.launching.peers import Peer
from stretto.schedule.orders import Buckets
from stretto.sync.asynchronous import Asynchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class Hogwild(Training[Bucket]):
    """`SharedMemory` + `Asynchronous` + `Replicated`."""

    goes_on_without = True

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._job, self._setting = job, setting
        self._optimizers = setting.loop.optimizers
        self.engaged = job.world_size > 1
        self.no_join = f"aggregate={strategy.aggregate!r}: nobody waits for anybody, so a worker may just stop"
        self._weights: SharedWeights | None = None
        self._places: Mapping[Tensor, int] = {}  # parameter -> its address
        self._names: Mapping[Tensor, str] = {}
        self._read: list[int | None] = [None] * len(self._optimizers)  # others' steps when a forward began, by optimizer
        self._ended = [0] * len(self._optimizers)  # others' steps when this worker's last one ended

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        asked = f"aggregate={strategy.aggregate!r}"
        if strategy.sync != Asynchronous():
            raise ConfigurationError(
                f"{asked} with sync={strategy.sync!r}: every worker steps with its own optimizer, and nobody knows how stale a "
                f"gradient is before it is applied.\nWrite sync=Asynchronous(), or aggregate=ParameterServer()."
            )
        if not strategy.compress.lossless:
            raise ConfigurationError(
                f"{asked} with compress={strategy.compress!r}: workers write into the same memory, and nothing is sent that "
                f"could be compressed.\nLeave compress= out."
            )
        if strategy.schedule != Buckets():
            raise ConfigurationError(
                f"{asked} with schedule={strategy.schedule!r}: workers write into the same memory, and there are no transfers to "
                f"put into an order.\nLeave schedule= out."
            )

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        for optimizer in optimizers:
            _check_optimizer(optimizer)
        for name, parameter in model.named_parameters():
            _check_parameter(name, parameter)
        _check_apart([*model.named_parameters()])
        _check_hosts(job.peers)

    # -- what is shared -----------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        """No buckets. Called again, some were frozen or unfrozen, which is fine, or there are others, which is not."""
        named = list(self._setting.model.named_parameters())
        if self._weights is None:
            self._names = {parameter: name for name, parameter in named}
            self._weights = SharedWeights(self._job, named, len(self._read))
            for parameter, view in self._weights.views.items():
                parameter.data = view
            self._places = {parameter: parameter.data_ptr() for parameter in self._weights.views}
        for name, parameter in named:
            self._check_here(name, parameter)
        return ()

    def close(self) -> None:
        """This worker's copy, of what the others may still be writing to."""
        for parameter, place in self._places.items():
            if parameter.data_ptr() == place and parameter.numel():
                parameter.data = parameter.detach().clone(memory_format=torch.preserve_format)
        self._places, self._weights = {}, None

    def _check_here(self, name: str, parameter: Tensor) -> None:
        if self._places.get(parameter) != parameter.data_ptr():
            raise ConfigurationError(
                f"{self._setting.name}: parameter {name} does not lie in the memory that the workers share. It was added or "
                f"converted, or something has given it other memory instead of writing into it: an optimizer (p.data = ...), "
                f"load_state_dict(assign=True), vector_to_parameters. Its updates would stay with this worker.\n"
                f"Write into it (p.copy_, p.add_). After a change of the model call stretto.distribute(model, optimizer, "
                f"strategy) again, on all workers."
            )

    # -- no rounds ----------------------------------------------------------------------------------------------------

    def bucket_ready(self, bucket: Bucket) -> None:
        raise AssertionError("there are no buckets")

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        return RoundResult(combined=False)

    # -- forwards and steps -------------------------------------------------------------------------------------------

    def before_forward(self, buffers: Watch | None, *, saved: bool) -> None:
        if torch.is_grad_enabled() and self._weights is not None:
            for number, known in enumerate(self._read):
                if known is None:
                    self._read[number] = self._weights.steps_of_others(number)

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        self._job.check_usable()
        _check_optimizer(optimizer)
        if self._job.weight != 1.0:
            raise ConfigurationError(
                f"weight({self._job.weight:g}) before a step of {self._setting.name}: every worker steps by its own gradient, "
                f"and there is no mean to weigh.\nMultiply the loss instead, or leave the step out."
            )
        for name, parameter in self._stepped_by(optimizer):
            self._check_here(name, parameter)
            if self._setting.check_finite and parameter.grad is not None and not is_finite(parameter.grad):
                raise NonFiniteGradient({self._job.rank: name})
        return EVERYBODY

    def after_step(self, optimizer: Optimizer) -> None:
        assert self._weights is not None
        for name, parameter in self._stepped_by(optimizer):
            self._check_here(name, parameter)
        number = next((number for number, given in enumerate(self._optimizers) if given is optimizer), None)
        if number is None:
            return
        began = self._read[number]
        now = self._weights.steps_of_others(number)
        self._job.ledger.count_round(staleness=now - (self._ended[number] if began is None else began))
        self._weights.count_step(number)
        self._read[number], self._ended[number] = None, now

    def _stepped_by(self, optimizer: Optimizer) -> Iterator[Named]:
        for group in optimizer.param_groups:
            yield from ((self._names[parameter], parameter) for parameter in group["params"] if parameter in self._names)


def _check_optimizer(optimizer: Optimizer) -> None:
    if decides_by_loss(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} on shared weights: it decides by several losses that belong together, while other "
            f"workers change the weights under it.\nUse an optimizer that steps by one gradient, such as torch.optim.SGD."
        )


def _check_parameter(name: str, parameter: Tensor) -> None:
    why = None
    if parameter.device.type != "cpu":
        why = f"is on {parameter.device}, and what is shared is host memory"
    elif type(parameter.data) is not Tensor or parameter.layout is not torch.strided:
        why = f"is a {type(parameter.data).__name__} of layout {parameter.layout}, and not plain numbers in memory"
    elif not is_dense(parameter):
        why = f"has shape {tuple(parameter.shape)} and strides {parameter.stride()}: gaps, or several elements in one place"
    if why is not None:
        raise ConfigurationError(
            f"parameter {name} {why}, so workers cannot share it.\n"
            f"Move the model (model.cpu()) or make the parameter contiguous, or write aggregate=ParameterServer()."
        )


def _check_apart(named: Sequence[Named]) -> None:
    """Parameters that lie in the same memory here would come apart: each gets a place of its own."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in named if p.numel())
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ConfigurationError(
                f"parameters {name} and {other} are different parameters in the same memory, and in the memory that workers "
                f"share each has a place of its own: they would come apart.\n"
                f"Tie them by making them one parameter: module.{other} = module.{name}."
            )


def _check_hosts(peers: Sequence[Peer]) -> None:
    apart = [peer for peer in peers if not peers[0].sees(peer)]
    if apart:
        where = "on another host" if apart[0].host != peers[0].host else "in another PID namespace (a container of its own)"
        raise ConfigurationError(
            f"aggregate=SharedMemory(): rank {apart[0].rank} is {where} than rank {peers[0].rank}, and memory is shared by "
            f"processes of one machine that see each other.\nStart all workers there, or write aggregate=ParameterServer()."
        )
