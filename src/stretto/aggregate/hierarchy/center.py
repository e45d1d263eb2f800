"""A center on servers, as one worker sees it: float32 values, which groups pull, and which what they push moves.

To the servers it is a model that SGD steps. Of elastic averaging the rate is 1, and what is pushed is a difference with its sign
turned; of outer steps (`outer_steps.py`) the rate and the momentum are those of the outer optimizer:

    x~ <- x~ - 1 * (-d)                  v <- mu v + Delta,  x~ <- x~ - lr (Delta + mu v)

so what `range_state` keeps, `head` orders and replicas hold is as ever, and whatever is pushed is applied exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stretto.aggregate.parameter_server import range_format
from stretto.aggregate.parameter_server.client import Export, Fill, Pull, Push
from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.layout import ParameterRange, ServedParameter, range_bytes_for
from stretto.aggregate.parameter_server.network import ServerNetwork
from stretto.aggregate.parameter_server.range_format import RangeContent
from stretto.aggregate.parameter_server.server_record import ServerLedger
from stretto.aggregate.parameter_server.service import ServedModel
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.step_under_way import bounds_of, optimizer_of, too_late
from stretto.aggregate.parameter_server.sync_spec import SyncSpec
from stretto.errors import StrettoError
from stretto.job import Job

ADDING: Final = OptimizerSpec("SGD", {"lr": 1.0})
VELOCITY: Final = "momentum_buffer"  # as torch's SGD calls it


class ExchangeWithCenter(NamedTuple):
    """A push and a pull under way."""

    gradient: Tensor  # in memory while it is sent
    pushes: list[Future[Any]]
    pulls: list[Future[Any]]


class Center:
    """All workers make it together, with the same `entries` and equal values. Only `clients` may pull, add and exchange; anybody
    may `read`. It ends with its `owner`. After an error it raises that again.

    A worker that has come back makes one by itself: it takes part in what the others have made, from the clock `clock` on."""

    def __init__(
        self,
        owner: object,
        name: str,
        job: Job,
        network: ServerNetwork,
        entries: Sequence[KeptParameter],
        sync: SyncAnswer,
        clients: Sequence[int],
        replicas: int,
        optimizer: OptimizerSpec = ADDING,
    ) -> None:
        self._name, self._job, self._network, self._sync, self._optimizer = name, job, network, sync, optimizer
        parameters = [ServedParameter(each.name, each.stop - each.start, each.group) for each in entries]
        model = ServedModel(
            parameters=parameters, servers=network.servers, workers=list(clients), replicas=replicas, sync=SyncSpec.of(sync),
            optimizers={each.group: optimizer for each in entries}, range_bytes=range_bytes_for(parameters, len(network.servers)),
        )  # fmt: skip
        self.clock = 0  # at which this worker has come in
        if job.life:
            self._service, model, self.clock = network.enter(model, owner)
        self._ranges = model.layout().ranges
        self._bounds = bounds_of(self._ranges)
        self._versions = [0] * len(self._ranges)
        self._clocks = [self.clock] * (1 + max((each.optimizer for each in entries), default=0))  # how often something was pushed
        self._broken: StrettoError | None = None
        self.values = torch.empty(self._bounds[-1][1] if self._bounds else 0, dtype=torch.float32, device="cpu")  # as last pulled
        for each in entries:
            self.values[each.start : each.stop].copy_(each.parameter.detach().reshape(-1))
        if not job.life:
            self._service = network.begin(model, owner)

    def fill(self, velocity: Tensor | None = None) -> None:
        """One worker does, before anybody pulls: the values are those that it has made it with. `velocity`: what the optimizer on
        the servers remembers, if it is not to begin anew."""
        fills = [Fill(each.index, self._memory(each)) for each in self._ranges]
        if velocity is not None:
            fills = [Fill(each.index, self._content(each, velocity), exported=True) for each in self._ranges]
        self._wait([self._service.request(fill) for fill in fills], "to fill the center")

    def _content(self, each: ParameterRange, velocity: Tensor) -> bytes:
        start, stop = self._bounds[each.index]
        vectors = {VELOCITY: velocity[start:stop].numpy()}
        return range_format.encode(RangeContent(self.values[start:stop].numpy(), vectors=vectors), self._optimizer)

    def pull(self, number: int) -> None:
        """The values of an optimizer's parameters, into `values`, when the rule lets this worker read."""
        self._read(number, self._wait(self._pulls(number), "for the center"))

    def add(self, number: int, difference: Tensor) -> None:
        """To the values of an optimizer's parameters. Returns when the servers have added it; counts the staleness."""
        gradient = difference.neg()
        self._count(number, self._wait(self._pushes(number, gradient), "for the center to take a difference"))

    def begin_exchange(self, number: int, gradient: Tensor) -> ExchangeWithCenter:
        """Push it, and pull what comes of it: values that have it, and what others have pushed until then. Does not wait."""
        pushes = self._pushes(number, gradient)
        return ExchangeWithCenter(gradient, pushes, self._pulls(number))

    def end_exchange(self, number: int, exchange: ExchangeWithCenter) -> None:
        """Returns when it is done, and the values are in `values`; counts the staleness."""
        answers = self._wait([*exchange.pushes, *exchange.pulls], "for an exchange with the center")
        self._count(number, answers[: len(exchange.pushes)])
        self._read(number, answers[len(exchange.pushes) :])

    def _pushes(self, number: int, gradient: Tensor) -> list[Future[Any]]:
        ranges, clock = self._of(number), self._clocks[number]
        begin = self._bounds[ranges[0].index][0] if ranges else 0
        memory, pushes = gradient.numpy(), []
        for each in ranges:
            start, stop = self._bounds[each.index]
            payload, version = memory[start - begin : stop - begin].data, self._versions[each.index]
            pushes.append(self._service.request(Push(each.index, clock, payload, self._optimizer.options, version)))
        self._clocks[number] += 1
        return pushes

    def _pulls(self, number: int) -> list[Future[Any]]:
        clock = self._clocks[number]
        return [self._service.request(Pull(each.index, clock, self._memory(each))) for each in self._of(number)]

    def _count(self, number: int, taken: Sequence[Any]) -> None:
        """The staleness of what was pushed: the updates of others since the values that it was made from."""
        ranges = self._of(number)
        stale = [each.version - 1 - self._versions[at.index] for each, at in zip(taken, ranges, strict=True) if each.applied]
        if stale:
            self._job.ledger.count_round(staleness=max(stale))

    def _read(self, number: int, pulled: Sequence[Any]) -> None:
        for each, answer in zip(self._of(number), pulled, strict=True):
            self._versions[each.index] = answer.version

    def read(self) -> Tensor:
        """The values as they are now, whoever asks, and without waiting for anybody."""
        return self.export()[0]

    def export(self) -> tuple[Tensor, Tensor | None]:
        """The same, and the velocity of the optimizer on the servers, if it has one by now."""
        values, velocity, found_any = torch.empty_like(self.values), torch.zeros_like(self.values), False
        exports = [self._service.request(Export(each.index)) for each in self._ranges]
        for (start, stop), found in zip(self._bounds, self._wait(exports, "for the center"), strict=True):
            data = memoryview(found.content)
            content = range_format.decode(data, stop - start, self._optimizer, has_mean_square=False, has_backups=False)
            values[start:stop].copy_(torch.from_numpy(content.values.copy()))
            if VELOCITY in content.vectors:
                velocity[start:stop].copy_(torch.from_numpy(content.vectors[VELOCITY].copy()))
                found_any = True
        return values, velocity if found_any else None

    def ledgers(self) -> dict[int, ServerLedger]:
        """What the servers have counted of it."""
        return self._network.ledgers(self._service)

    def end(self, error: StrettoError | None = None) -> None:
        """This worker needs it no longer, and nobody is to wait for it."""
        self._broken = self._broken or error
        self._network.end(self._service)

    def _of(self, number: int) -> list[ParameterRange]:
        return [each for each in self._ranges if optimizer_of(each) == number]

    def _memory(self, each: ParameterRange) -> memoryview:
        start, stop = self._bounds[each.index]
        return self.values.numpy()[start:stop].data

    def _wait(self, answers: Sequence[Future[Any]], what: str) -> list[Any]:
        if self._broken is not None:
            raise self._broken
        begin_ns, patience_s = time.perf_counter_ns(), self._job.timeouts.arrive_s
        done, missing = wait(answers, patience_s, FIRST_EXCEPTION)
        self._job.ledger.count_wait(time.perf_counter_ns() - begin_ns)
        for answer in done:
            if (problem := answer.exception()) is not None:
                text = f"a request has failed: {problem!r}"
                self._broken = failed = problem if isinstance(problem, StrettoError) else StrettoError(text)
                raise failed
        if missing:
            after = f"{', '.join(map(str, self._clocks))} exchanges. With sync={self._sync!r}"
            self._broken = error = too_late(f"{self._name}: rank {self._job.rank}", what, patience_s, after)
            self._network.give_up(self._service, error)
            raise error
        return [answer.result() for answer in answers]
