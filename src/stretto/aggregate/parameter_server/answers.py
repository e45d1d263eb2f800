"""Values on their way down as differences to what the worker has: what `ParameterServer(answers=codec)` does.

    the server of a range, for each worker     d = x - c          x: the values; c: this worker's copy, as the server knows it
                                               send C(d)
                                               c <- c + D(C(d))   what the worker has when it has read that
    the worker                                 c <- c + D(C(d))   and computes on c

What C leaves out of a difference is in the next one, so nothing else has to be remembered: error feedback of a state, and not
of a sum. While the values stand still the copy converges to them, for any contraction C; while they move it lags behind by what
the last few payloads left out.

The two copies are the same to the last bit, or the values are sent whole, as float32. Each copy that a worker is sent has a
*name* that no other one has: the server, its life, and a number. With each pull a worker says the name of the one that it has,
and the server of the range compares. So values come whole at the first pull of a life, from another server than before (which
knows nobody's copy), after an answer that was lost or came twice, and where a difference is not finite. A server takes the worker
to have an answer as soon as it has written it. If it dies before the answer has left, the next server begins anew all the same.

Cost:      m bytes down, times what the codec takes of 32 bits; an encoding and a decoding at the server for each pull, a decoding
           at the worker.
Memory:    of a server: its part of the model once for each worker that pulls. Of a worker: nothing more, for its
           copy is the memory into which it pulls.
Invariant: a difference is only read by a worker whose copy has the name of the one that it was taken to.
References: Koloskova, Stich and Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed
           communication" (CHOCO-SGD), ICML 2019, for differences to a copy that both sides have; Richtarik, Sokolov and
           Fatkhullin, "EF21", NeurIPS 2021, which does it to gradients.
Departs:   both have one copy for all receivers. Here workers read at different times, so each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.aggregate.parameter_server import read_only
from stretto.aggregate.parameter_server.client import PulledPayload
from stretto.aggregate.parameter_server.encoding import RangeBlocks, as_bytes, read_compression, refusal_of_answers
from stretto.aggregate.parameter_server.layout import ParameterRange, ServedParameter
from stretto.aggregate.parameter_server.messages import NO_COPY, CopyName, DifferenceTo, ValuesPulled
from stretto.compress.codec import Codec, Compression
from stretto.compress.exchange import blamed_on
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import ConfigurationError, FrameError
from stretto.protocol.machine import Payload


class AnswerCodec(NamedTuple):
    """How differences of one range are written."""

    codec: Codec
    blocks: Blocks

    def written(self, difference: Tensor, draw: int) -> Tensor:
        return self.codec.encode(difference, self.blocks, RandomKeys.of_round(draw, 0))

    def read(self, payload: Tensor, draw: int) -> Tensor:
        """Decoded, and not added at once: kernels that do both may round differently from those of another machine."""
        return self.codec.decode(payload, self.blocks, RandomKeys.of_round(draw, 0))


def answer_codecs(
    ranges: Sequence[ParameterRange], parameters: Sequence[ServedParameter], text: str
) -> Callable[[int], AnswerCodec | None]:
    """How the answers of each range are written, from the text of a codec; if it is empty, as float32."""
    if not text:
        return lambda index: None
    codec: Compression = read_compression(text)
    if (reason := refusal_of_answers(codec)) is not None:
        raise ConfigurationError(f"answers={text[:100]}: {reason}.\nName a contraction, such as Int8() or TopK(0.1).")
    assert isinstance(codec, Codec)
    known, blocks = codec, RangeBlocks(ranges, parameters)
    return lambda index: AnswerCodec(known, blocks.of(index, known))


# -- at a server ------------------------------------------------------------------------------------------------------


class WrittenAnswer(NamedTuple):
    """`since`: the copy to which the payload is the difference; None: these are the values. `copy`: what the worker has then."""

    payload: Payload
    since: CopyName | None
    copy: CopyName | None


class SentCopies:
    """What workers have of one range, as far as its server knows. `name`: makes names, no two of which are the same."""

    def __init__(self, how: AnswerCodec, name: Callable[[], CopyName]) -> None:
        self._how, self._name = how, name
        self._copies: dict[int, tuple[CopyName, Tensor]] = {}  # by worker

    def answer(self, worker: int, asked: DifferenceTo, values: Payload) -> WrittenAnswer:
        """What this worker is sent of these values."""
        current, name = read_only.as_tensor(np.frombuffer(values, np.float32)), self._name()
        known = self._copies.get(worker)
        if known is not None and known[0] == asked.copy:
            copy = known[1]
            difference = torch.sub(current, copy)
            if bool(difference.isfinite().all()):
                payload = self._how.written(difference, asked.draw)
                copy.add_(self._how.read(payload, asked.draw))
                self._copies[worker] = name, copy
                return WrittenAnswer(payload.numpy().data, asked.copy, name)
        self._copies[worker] = name, current.clone()
        return WrittenAnswer(values, None, name)

    def forget(self, worker: int) -> None:
        self._copies.pop(worker, None)


# -- at a worker ------------------------------------------------------------------------------------------------------


class OwnCopies:
    """The copies of one worker, in memory that nothing else writes to, and their names."""

    def __init__(self, how: Callable[[int], AnswerCodec | None]) -> None:
        self._how = how
        self._names: dict[int, CopyName] = {}

    def wanted(self, index: int, draw: int, *, whole: bool) -> DifferenceTo:
        """What to ask for; `whole`: the values themselves."""
        return DifferenceTo(NO_COPY if whole else self._names.get(index, NO_COPY), draw)

    def bytes_down(self, each: ParameterRange) -> int:
        """The length of an answer; the longest that there can be, where it depends on the values."""
        how = self._how(each.index)
        return each.num_bytes if how is None else how.codec.max_bytes(how.blocks)

    def into(self, each: ParameterRange, answer: Future[PulledPayload], memory: Tensor, draw: int) -> Future[ValuesPulled]:
        """The copy of a range in `memory` becomes what the answer says, when it comes."""
        read = Future[ValuesPulled]()

        def came(answer: Future[PulledPayload]) -> None:
            try:
                self._take(each, answer.result(), memory, draw)
                read.set_result(answer.result().header)
            except BaseException as problem:
                read.set_exception(problem)

        answer.add_done_callback(came)
        return read

    def _take(self, each: ParameterRange, pulled: PulledPayload, memory: Tensor, draw: int) -> None:
        source, header, payload = pulled
        how, name = self._how(each.index), header.copy
        if name is None or how is None:
            raise FrameError(source, f"an answer for range {each.index} without the name of a copy")
        if header.since is None:
            if len(payload) != each.num_bytes:
                raise FrameError(source, f"{len(payload)} bytes of values for range {each.index}")
            memory.copy_(as_bytes(payload).view(torch.float32))
        else:
            with blamed_on(source, repr(how.codec)):
                memory.add_(how.read(as_bytes(payload), draw))
        self._names[each.index] = name
