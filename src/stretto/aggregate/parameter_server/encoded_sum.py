"""The values of a range with `Synchronous` and a codec: the mean of the last round as a server has written it, and what that left
out.

    m = (1/P) sum of what the payloads say      in the order of ranks
    p = m + e                                   e: what the server has not said yet; 0 without error feedback
    reply C(p),  e <- p - C(p)                  the same bytes for all workers

This is what a worker of an all-reduce does with its blocks in a two-phase exchange (`compress/exchange.py`), with the same bits.

A round of which workers do not use the reply (a gradient was not finite, a backward failed, nobody had a gradient of some
parameter) must not change e there. Workers know that when the round is over, and say so with the next push: e of the slices that
were *unheard* becomes what it was before.

In rounds that are not compressed (`WarmUp`) the reply is the sum, as float32.

Memory:    the reply; with error feedback e and the one before it.
Invariant: mean of the workers' residuals + e + sum of what workers have used = mean of all gradients. Every server of a chain is
           given the same sums, so it has the same bytes: as long as its codec gives the same bits there, as it does on machines
           of one kind with the same software.
Reference: Tang et al., "DoubleSqueeze", ICML 2019, for error feedback on both ways.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.aggregate.parameter_server import read_only
from stretto.aggregate.parameter_server.encoding import RangeEncoding, writing_in
from stretto.aggregate.parameter_server.layout import ParameterSlice
from stretto.aggregate.parameter_server.messages import CodecRound
from stretto.aggregate.parameter_server.shard_optimizer import OptionValue
from stretto.compress.exchange import keys_of_reply
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload
from stretto.protocol.machine import Payload

HEADER: Final = struct.Struct("<qB")  # bytes of the reply, or NO_REPLY; how many vectors follow
NO_REPLY: Final = -1
Floats = NDArray[np.float32]


class EncodedSum:
    """See the module's text. `RangeValues`, of which `hand_out` takes the place of `apply`."""

    def __init__(self, encoding: RangeEncoding, slices: Sequence[ParameterSlice]) -> None:
        self._encoding = encoding
        self._lengths = [each.stop - each.start for each in slices]
        self._reply: Payload = b""
        self._residual: Tensor | None = None
        self._before: Tensor | None = None  # the residual before the last round

    def apply(
        self, gradient: Floats, options: Mapping[str, OptionValue], *, lr_scale: float = 1.0, worker: int | None = None
    ) -> None:
        raise MalformedPayload("a sum that is to be handed out encoded, and of which nobody says in which round.")

    def hand_out(self, total: Floats, weight: float, drawn: CodecRound) -> None:
        """The sum of a round, of gradients that count so many times together."""
        writing = writing_in(self._encoding.compression, drawn.draw)
        if writing is None:
            self._reply = total.tobytes()
            return
        codec, remembers = writing
        blocks, keys = self._encoding.blocks(codec), keys_of_reply(codec, RandomKeys.of_round(drawn.draw, 0))
        mean = torch.mul(read_only.as_tensor(total), 1.0 / weight)
        if remembers:
            self._put_back(drawn.unheard)
            if self._residual is not None:
                mean.add_(self._residual)
        if not bool(mean.isfinite().all()):
            torch.nan_to_num(mean, out=mean)  # sums of large values; codecs write finite ones
        payload = codec.encode_residual(mean, blocks, keys) if remembers else codec.encode(mean, blocks, keys)
        if remembers:
            self._before, self._residual = self._residual, mean
        self._reply = payload.numpy().data

    def _put_back(self, unheard: Sequence[tuple[int, int]]) -> None:
        if self._residual is None:
            return
        bounds = [0, *np.cumsum(self._lengths).tolist()]
        for first, last in unheard:
            part = self._residual[bounds[first] : bounds[last]]
            if self._before is None:
                part.zero_()
            else:
                part.copy_(self._before[bounds[first] : bounds[last]])

    def value(self) -> Payload:
        return self._reply

    def pulled_by(self, worker: int) -> None:
        """Nothing here depends on it."""

    def forget(self, worker: int) -> None:
        """Nothing here depends on it."""

    def export(self) -> bytes:
        vectors = [each for each in (self._residual, self._before) if each is not None]
        reply = memoryview(self._reply)
        header = HEADER.pack(reply.nbytes, len(vectors))
        return b"".join([header, reply, *(each.numpy().data for each in vectors)])

    def install(self, data: memoryview) -> None:
        num_reply, vectors = read(data, self._encoding.numel)
        if num_reply is not None:
            self._reply = bytes(data[HEADER.size : HEADER.size + num_reply])
        self._residual, self._before = (*vectors, None, None)[:2]


# -- as bytes ---------------------------------------------------------------------------------------------------------


def read(data: memoryview, numel: int) -> tuple[int | None, list[Tensor]]:
    """The length of the reply, None if it stays as it is; and copies of the residual and the one before, as far as there are."""
    if data.nbytes < HEADER.size:
        raise MalformedPayload(f"what a server has left over of a range has {data.nbytes} bytes.")
    num_reply, count = HEADER.unpack_from(data)
    begin, size = HEADER.size + max(num_reply, 0), 4 * numel
    if num_reply < NO_REPLY or count > 2 or data.nbytes != begin + count * size:
        raise MalformedPayload(
            f"what a server has left over of a range of {numel} elements: {data.nbytes} bytes with a reply of {num_reply} and "
            f"{count} vectors."
        )
    vectors = [
        torch.from_numpy(np.frombuffer(data[start : start + size], np.float32).copy())
        for start in range(begin, data.nbytes, size or 1)
    ]
    if not all(bool(each.isfinite().all()) for each in vectors):
        raise MalformedPayload("what a server has left over of a range is not finite.")
    return (None if num_reply == NO_REPLY else num_reply), vectors


def residual_of(data: memoryview, each: Sequence[ParameterSlice], unheard: Sequence[tuple[int, int]]) -> Tensor | None:
    """What a server has not said yet of a range, by what it has exported; None: nothing at all."""
    lengths = [piece.stop - piece.start for piece in each]
    _, vectors = read(data, sum(lengths))
    if not vectors:
        return None
    bounds = [0, *np.cumsum(lengths).tolist()]
    for first, last in unheard:
        part = slice(bounds[first], bounds[last])
        vectors[0][part] = vectors[1][part] if len(vectors) > 1 else 0.0
    return vectors[0]


def to_begin_with(residual: Tensor | None) -> bytes:
    """For a range whose server shall go on with this residual."""
    return HEADER.pack(NO_REPLY, 0 if residual is None else 1) + (b"" if residual is None else residual.numpy().tobytes())
