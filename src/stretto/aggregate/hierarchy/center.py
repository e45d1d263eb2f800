"""The center of elastic averaging on servers, as one worker sees it: float32 values, to which differences are added.

To the servers it is a model that SGD steps with a rate of 1, and what is pushed is the difference with its sign turned:

    x~ <- x~ - 1 * (-d)

so what `range_state` keeps, `head` orders and replicas hold is as ever, and an addition is applied exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final

import torch
from torch import Tensor

from stretto.aggregate.parameter_server import range_format
from stretto.aggregate.parameter_server.client import Export, Fill, Pull, Push
from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.layout import ParameterRange, ServedParameter, range_bytes_for
from stretto.aggregate.parameter_server.network import ServerNetwork
from stretto.aggregate.parameter_server.server_record import ServerLedger
from stretto.aggregate.parameter_server.service import ServedModel
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.step_under_way import bounds_of, optimizer_of, too_late
from stretto.aggregate.parameter_server.sync_spec import SyncSpec
from stretto.errors import StrettoError
from stretto.job import Job

ADDING: Final = OptimizerSpec("SGD", {"lr": 1.0})


class Center:
    """All workers make it together, with the same `entries` and equal values. Only `clients` may `pull` and `add`; anybody may
    `read`. It ends with its `owner`. After an error it raises that again."""

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
    ) -> None:
        self._name, self._job, self._network, self._sync = name, job, network, sync
        parameters = [ServedParameter(each.name, each.stop - each.start, each.group) for each in entries]
        model = ServedModel(
            parameters=parameters, servers=network.servers, workers=list(clients), replicas=replicas, sync=SyncSpec.of(sync),
            optimizers={each.group: ADDING for each in entries}, range_bytes=range_bytes_for(parameters, len(network.servers)),
        )  # fmt: skip
        self._ranges = model.layout().ranges
        self._bounds = bounds_of(self._ranges)
        self._versions = [0] * len(self._ranges)
        self._clocks = [0] * (1 + max((each.optimizer for each in entries), default=0))  # how often something was added
        self._broken: StrettoError | None = None
        self.values = torch.empty(self._bounds[-1][1] if self._bounds else 0, dtype=torch.float32, device="cpu")  # as last pulled
        for each in entries:
            self.values[each.start : each.stop].copy_(each.parameter.detach().reshape(-1))
        self._service = network.begin(model, owner)

    def fill(self) -> None:
        """One worker does, before anybody pulls: the values are those that it has made it with."""
        self._wait([self._service.request(Fill(each.index, self._memory(each))) for each in self._ranges], "to fill the center")

    def pull(self, number: int) -> None:
        """The values of an optimizer's parameters, into `values`, when the rule lets this worker read."""
        ranges = self._of(number)
        pulls = [self._service.request(Pull(each.index, self._clocks[number], self._memory(each))) for each in ranges]
        for each, pulled in zip(ranges, self._wait(pulls, "for the center"), strict=True):
            self._versions[each.index] = pulled.version

    def add(self, number: int, difference: Tensor) -> None:
        """To the values of an optimizer's parameters. Returns when the servers have added it; counts the staleness."""
        ranges, clock = self._of(number), self._clocks[number]
        begin = self._bounds[ranges[0].index][0] if ranges else 0
        memory, pushes = difference.neg().numpy(), []
        for each in ranges:
            start, stop = self._bounds[each.index]
            payload, version = memory[start - begin : stop - begin].data, self._versions[each.index]
            pushes.append(self._service.request(Push(each.index, clock, payload, ADDING.options, version)))
        self._clocks[number] += 1
        taken = self._wait(pushes, "for the center to take a difference")
        stale = [each.version - 1 - self._versions[at.index] for each, at in zip(taken, ranges, strict=True) if each.applied]
        if stale:
            self._job.ledger.count_round(staleness=max(stale))

    def read(self) -> Tensor:
        """The values as they are now, whoever asks, and without waiting for anybody."""
        values = torch.empty_like(self.values)
        exports = [self._service.request(Export(each.index)) for each in self._ranges]
        for (start, stop), found in zip(self._bounds, self._wait(exports, "for the center"), strict=True):
            data = memoryview(found.content)
            content = range_format.decode(data, stop - start, ADDING, has_mean_square=False, has_backups=False)
            values[start:stop].copy_(torch.from_numpy(content.values.copy()))
        return values

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
