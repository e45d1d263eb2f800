"""What a transfer by way of servers costs in this job: real ones of a few sizes, and a straight line through their times.

A transfer of n bytes is n pushed and n pulled by every worker, in ranges, in two hops. It is measured as all-reduces are
(`plan/transfer_cost.py`), with a model for the purpose that has a parameter of each size, on the servers that training uses.

Ranges are those of training, but not tiny ones, of which a probe would have thousands.

Cost: some 20 pushes and pulls of up to 4 MiB; fewer on a slow network.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final

import msgspec
import torch

from stretto.aggregate.parameter_server.client import Pull, Push
from stretto.aggregate.parameter_server.layout import LEAST_RANGE_BYTES, VALUE_BYTES, ParameterRange, ServedParameter
from stretto.aggregate.parameter_server.network import ServerNetwork
from stretto.aggregate.parameter_server.service import ServedModel
from stretto.collectives import calls
from stretto.errors import WireError
from stretto.job import Job
from stretto.plan.profile import TransferCost
from stretto.plan.transfer_cost import SIZES, fitted, measured
from stretto.protocol.loop import Running

HOPS: Final = 2


def cost_with_servers(job: Job, network: ServerNetwork, replicas: int, range_bytes: int) -> TransferCost:
    """Measure it. All workers call it together, and all get rank 0's result."""
    model = ServedModel(
        parameters=[ServedParameter(f"{size} bytes", size // VALUE_BYTES, str(size)) for size in SIZES],
        servers=network.servers, workers=list(range(job.world_size)), replicas=replicas,
        range_bytes=max(range_bytes, LEAST_RANGE_BYTES),
    )  # fmt: skip
    probe = _Probe(job, model)
    probe.service = network.begin(model, probe)
    try:
        times = measured(lambda: calls.start_barrier(job.world).wait(), probe.exchange, lambda s: max(job.gather_object(s)))
    finally:
        network.end(probe.service)
    found = msgspec.structs.replace(fitted(times), hops=HOPS)
    first = job.gather_object(msgspec.to_builtins(found))[0]
    return msgspec.convert(first, TransferCost)


class _Probe:
    """Each exchange is a round of the ranges of its size."""

    service: Running

    def __init__(self, job: Job, model: ServedModel) -> None:
        self._patience_s = job.timeouts.arrive_s
        self._ranges: dict[str, list[ParameterRange]] = {}
        self._clocks = dict.fromkeys(map(str, SIZES), 0)
        for each in model.layout().ranges:
            self._ranges.setdefault(each.group, []).append(each)

    def exchange(self, values: torch.Tensor) -> None:
        size = str(values.nbytes)
        clock, memory, begin, answers = self._clocks[size], values.numpy(), 0, []
        for each in self._ranges[size]:
            part = memory[begin : begin + each.numel].data
            answers.append(self.service.request(Push(each.index, clock, part, {}, 0)))
            answers.append(self.service.request(Pull(each.index, clock + 1, part)))
            begin += each.numel
        self._clocks[size] += 1
        self._wait(answers)

    def _wait(self, answers: Sequence[Future[Any]]) -> None:
        done, missing = wait(answers, self._patience_s, FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        if missing:
            raise WireError(
                f"transfers to the servers were measured, and one has not ended within {self._patience_s:g} s.\n"
                f"A server or a worker is stuck, or allow more time: stretto.init(timeouts=Timeouts(arrive_s=...))."
            )
