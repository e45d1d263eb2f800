"""What a worker pushes to servers that step, as a codec writes it, and what that leaves out.

    p = g + e            the gradient of a range, and what was left out of those before it; e is 0 without error feedback
    push C(p)            a step of the optimizer on the server, when the rule of `sync=` says so
    e <- p - C(p)

What becomes of a push decides what becomes of e:

    applied              e stays as it is
    discarded            (`BackupWorkers`, too late) e is as it was before: this gradient is dropped, as it would be without a
                         codec, and nothing that earlier ones left out. To say it later would let the gradients of a worker
                         that is always late pile up, and come all at once
    nobody knows         (its server died after it had counted it) taken as applied

Only the last push of a range is in question: a worker hears that it was discarded before it gets the next values of that range,
whatever it knows of other ranges by then. One that has been gathered for an update can only be discarded if its server dies.

Values come back as float32. With `Float16` and `BFloat16`, which write any numbers, values too travel in 16 bits: a worker
computes on rounded values, and small updates add up in the float32 of the servers all the same. No other codec writes values:
what it left out of a weight would be missing from it. (Of differences it may: `answers.py`.)

Invariant: the sum of what servers have applied of a worker, plus e, is the sum of its gradients that were not discarded.
Memory:    with error feedback 8 bytes per parameter in each worker: e, and e before the last push.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Final

import torch
from torch import Tensor

from stretto.aggregate.parameter_server.client import PulledPayload
from stretto.aggregate.parameter_server.encoding import RangeBlocks, as_bytes, codec_of_values, writing_in
from stretto.aggregate.parameter_server.inventory import Inventory, KeptParameter
from stretto.aggregate.parameter_server.layout import ParameterRange
from stretto.aggregate.parameter_server.messages import CodecRound, PushTaken, ValuesPulled
from stretto.aggregate.parameter_server.step_under_way import bounds_of
from stretto.compress.error_feedback import RESIDUAL
from stretto.compress.exchange import blamed_on
from stretto.compress.random_numbers import RandomKeys
from stretto.engine.training import TensorsByName
from stretto.protocol.machine import Payload

KEYS: Final = RandomKeys()  # what writes values draws nothing


class PushEncoding:
    """One worker's, for one service. `saved`: what `state` gave; what it has nothing for begins anew."""

    def __init__(self, rank: int, inventory: Inventory, ranges: Sequence[ParameterRange], saved: TensorsByName) -> None:
        self._rank = rank
        self._inventory = inventory
        self._blocks = RangeBlocks(ranges, inventory.parameters)
        self._starts = [start for start, _ in bounds_of(ranges)]
        self._residual: Tensor | None = None
        self._before: dict[int, tuple[int, Tensor]] = {}  # range -> the clock of its last push, and the residual before it
        for each in self.compressed(inventory.entries):
            if (value := saved.get(each.name, {}).get(RESIDUAL)) is not None:
                self._everything()[each.start : each.stop] = value.to("cpu", torch.float32).reshape(-1)

    def compressed(self, entries: Iterable[KeptParameter]) -> list[KeptParameter]:
        """Those of these parameters whose gradients are compressed."""
        return [each for each in entries if each.group in self._inventory.compressions]

    # -- up -----------------------------------------------------------------------------------------------------------

    def payload(self, each: ParameterRange, gradient: Tensor, clock: int, number: int) -> tuple[Payload, CodecRound | None]:
        """What is pushed of this gradient of a range, in this worker's round of that number."""
        compression = self._inventory.compressions.get(each.group)
        if compression is None:
            return gradient.numpy().data, None
        drawn, writing = CodecRound(number, []), writing_in(compression, number)
        if writing is None:
            return gradient.numpy().data, drawn
        codec, remembers = writing
        blocks, keys = self._blocks.of(each.index, codec), RandomKeys.of_round(number, self._rank)
        if not remembers:
            return codec.encode(gradient, blocks, keys).numpy().data, drawn
        residual = self._of(each)
        self._before[each.index] = clock, residual.clone()
        residual.add_(gradient)
        return codec.encode_residual(residual, blocks, keys).numpy().data, drawn

    def settle(self, clock: int, told: Iterable[tuple[ParameterRange, PushTaken]]) -> None:
        """What has become of pushes of that clock, before the next one of the same range."""
        for each, answer in told:
            last = self._before.get(each.index)
            if answer.applied is False and last is not None and last[0] == clock:
                self._of(each).copy_(last[1])

    def _of(self, each: ParameterRange) -> Tensor:
        start = self._starts[each.index]
        return self._everything()[start : start + each.numel]

    def _everything(self) -> Tensor:
        if self._residual is None:
            self._residual = torch.zeros(self._inventory.numel, dtype=torch.float32, device="cpu")
        return self._residual

    # -- down ---------------------------------------------------------------------------------------------------------

    def has_rounded(self, group: str) -> bool:
        """Whether values of this group come in 16 bits."""
        return self._inventory.travels_rounded(group)

    def bytes_down(self, each: ParameterRange) -> int:
        return each.num_bytes // 2 if self.has_rounded(each.group) else each.num_bytes

    def into(self, each: ParameterRange, answer: Future[PulledPayload], memory: Tensor) -> Future[ValuesPulled]:
        """The values of a range, read into memory when they come."""
        codec = codec_of_values(self._inventory.compressions[each.group])
        assert codec is not None
        blocks, read = self._blocks.of(each.index, codec), Future[ValuesPulled]()

        def came(answer: Future[PulledPayload]) -> None:
            try:
                source, header, payload = answer.result()
                with blamed_on(source, repr(codec)):
                    memory.copy_(codec.decode(as_bytes(payload), blocks, KEYS))
                read.set_result(header)
            except BaseException as problem:
                read.set_exception(problem)

        answer.add_done_callback(came)
        return read

    # -- what is remembered -------------------------------------------------------------------------------------------

    def state(self) -> TensorsByName:
        """By parameter, in its shape."""
        if self._residual is None:
            return {}
        return {
            each.name: {RESIDUAL: self._residual[each.start : each.stop].view(each.parameter.shape).clone()}
            for each in self.compressed(self._inventory.entries)
        }
