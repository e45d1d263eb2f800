"""Gradients of a range as a codec writes them: which codecs servers know, as data, and what they make of a push.

A payload is one range's. Where a parameter is cut, it is cut between blocks of its codec, and the blocks are those of the whole
parameter: what is sent for it does not depend on how it was cut. Where one block is longer than a range may be (the whole tensor
of `TopK`, say), each piece counts as a tensor of its own: the largest of each piece are sent, with a name of its own for random
numbers, "name[start:stop]".

What is random is drawn by the round of which a push says that it is (`CodecRound`), so a server reads it without having seen the
rounds before.

Servers get codecs as text and build them with a whitelist, as strategies are read; a codec that is not stretto's own is not known
to them. Raw codecs, `ErrorFeedback`, `EF21` and `WarmUp` are, for all a server has to know is which codec writes a round, and
whether what it leaves out is remembered. What drives rounds of its own between workers has nothing that a server could add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.aggregate.parameter_server import read_only
from stretto.aggregate.parameter_server.layout import ParameterRange, ServedParameter
from stretto.aggregate.parameter_server.messages import CodecRound
from stretto.compress import catalogue
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.by_parameter import ByParameter
from stretto.compress.codec import Codec, Compression
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.layout import Blocks, Layout
from stretto.compress.none import NoCompression
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign
from stretto.compress.warm_up import WarmUp
from stretto.errors import ConfigurationError, MalformedPayload
from stretto.plain_calls import CallReader
from stretto.protocol.machine import Payload

MAX_ROUND: Final = 1 << 53
AROUND: Final = (ErrorFeedback, EF21, WarmUp)
CLASSES: Final = catalogue.classes()
KNOWN: Final = {each.__name__: each for each in CLASSES if issubclass(each, Codec) or each in (*AROUND, NoCompression)}
READER: Final = CallReader(KNOWN, "codec of a served model", "ErrorFeedback(Sign())")
Floats = NDArray[np.float32]


# -- which codecs -----------------------------------------------------------------------------------------------------


def refusal(compression: Compression, *, steps: bool) -> str | None:
    """Why servers cannot read it, or, if they step, cannot step with it; None if they can."""
    if isinstance(compression, ByParameter):
        return next((reason for _, each in compression.rules if (reason := refusal(each, steps=steps)) is not None), None)
    if isinstance(compression, WarmUp):
        return refusal(compression.codec, steps=steps) or refusal(compression.before, steps=steps)
    if isinstance(compression, ErrorFeedback):
        return refusal(compression.codec, steps=steps)
    if steps and isinstance(compression, EF21):
        return f"{compression!r} needs the mean of all workers in every round, and with servers that step there is none"
    if isinstance(compression, EF21):
        return refusal(compression.codec, steps=steps)
    if steps and isinstance(compression, Sign) and compression.vote:
        return f"{compression!r} is a vote of all workers, and with servers that step each gradient counts by itself"
    if type(compression) in KNOWN.values():
        return None
    if type(compression) not in CLASSES:
        return f"{compression!r} is a codec of your own, and servers are processes of their own that know stretto's only"
    return f"{compression!r} drives rounds of its own between workers, and servers read what each worker sends by itself"


def refusal_of_answers(codec: object) -> str | None:
    """Why values cannot be sent as differences that it writes (`answers.py`), or None."""
    if not isinstance(codec, Codec):
        return "that is no codec by itself; what one leaves out of a difference is in the next one, without error feedback"
    return codec.no_residual or codec.no_contraction or refusal(codec, steps=True)


def read_compression(text: str) -> Compression:
    """What a server is told. Raises `ConfigurationError` for anything that it does not know."""
    compression = READER.read(text)
    if not isinstance(compression, Compression):
        raise READER.unreadable(text, f"it describes {compression!r}, which is not a codec")
    if (reason := refusal(compression, steps=False)) is not None:
        raise READER.unreadable(text, reason)
    return compression


class Writing(NamedTuple):
    """The codec that writes a round, and whether it keeps what a payload leaves out for a later one (error feedback)."""

    codec: Codec
    remembers: bool


def writing_in(compression: Compression, number: int) -> Writing | None:
    """In the round of that number; None: values travel as they are."""
    if isinstance(compression, WarmUp):
        return writing_in(compression.before if number < compression.rounds else compression.codec, number)
    if isinstance(compression, (ErrorFeedback, EF21)) and isinstance(compression.codec, Codec):
        return Writing(compression.codec, True)
    return Writing(compression, False) if isinstance(compression, Codec) else None


def codec_of_values(compression: Compression) -> Codec | None:
    """The codec in which pulled values travel when gradients are pushed with `compression`; None: they travel as float32."""
    codec = compression.codec if isinstance(compression, ErrorFeedback) else compression
    if isinstance(codec, Float16):
        return Float16()
    return BFloat16() if isinstance(codec, BFloat16) else None


# -- how a range is cut -----------------------------------------------------------------------------------------------


def unit_of(compression: Compression, name: str, shape: tuple[int, ...]) -> int:
    """How long a block of a parameter is."""
    writing = writing_in(compression, MAX_ROUND)
    if writing is None:
        return 1
    lengths = writing.codec.blocks(Layout.of([(name, shape)])).lengths
    return int(lengths[0]) if len(lengths) else 1


def payload_bytes(compression: Compression, name: str, shape: tuple[int, ...]) -> int:
    """What a push of this parameter's gradient takes, after a warm-up; as float32 where that depends on the values."""
    writing = writing_in(compression, MAX_ROUND)
    found = None if writing is None else writing.codec.num_bytes(writing.codec.blocks(Layout.of([(name, shape)])))
    return 4 * _size(shape) if found is None else found


class RangeBlocks:
    """The blocks of every range, the same for workers and servers."""

    def __init__(self, ranges: Sequence[ParameterRange], parameters: Sequence[ServedParameter]) -> None:
        self._ranges = ranges
        self._shapes = {each.name: each.shape or (each.numel,) for each in parameters}
        self._made: dict[tuple[int, Codec], Blocks] = {}
        self._last: tuple[Any, Blocks] | None = None  # of a whole parameter, while its pieces are asked for

    def of(self, index: int, codec: Codec) -> Blocks:
        key = index, codec
        if key not in self._made:
            self._made[key] = self._make(self._ranges[index], codec)
        return self._made[key]

    def _make(self, each: ParameterRange, codec: Codec) -> Blocks:
        first = each.slices[0]
        if len(each.slices) > 1 or first.stop - first.start == _size(self._shapes[first.name]):
            return codec.blocks(Layout.of((name, self._shapes[name]) for name in each.names))
        whole = self._of_whole(first.name, codec)
        begin, end = (int(torch.searchsorted(whole.bounds, place)) for place in (first.start, first.stop))
        if int(whole.bounds[begin]) == first.start and int(whole.bounds[end]) == first.stop:
            return whole.part(begin, end)
        return codec.blocks(Layout.of([(f"{first.name}[{first.start}:{first.stop}]", (first.stop - first.start,))]))

    def _of_whole(self, name: str, codec: Codec) -> Blocks:
        key = name, codec
        if self._last is None or self._last[0] != key:
            self._last = key, codec.blocks(Layout.of([(name, self._shapes[name])]))
        return self._last[1]


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def check_shapes(parameters: Sequence[ServedParameter]) -> None:
    """Refuse a model whose shapes do not fit its numbers of elements. A server checks what it is told to serve."""
    for each in parameters:
        if each.unit < 1 or (each.shape and (min(each.shape) < 0 or _size(each.shape) != each.numel)):
            raise ConfigurationError(
                f"parameter {each.name[:100]} has {each.numel} elements, the shape {each.shape} and cuts at every {each.unit}-th."
            )


# -- what a server makes of a push ------------------------------------------------------------------------------------


@dataclass
class RangeEncoding:
    """The gradients of one range, as they come to its server."""

    compression: Compression
    blocks: Callable[[Codec], Blocks]
    num_slices: int
    numel: int
    _checked: tuple[Payload, Floats] | None = None  # mostly that is what is read next

    def fault_in(self, payload: memoryview, drawn: CodecRound | None) -> str | None:
        """Why this is no gradient of the range, or None."""
        if drawn is None:
            return f"it is not encoded, and gradients of this range come as {self.compression!r} writes them"
        if not 0 <= drawn.draw < MAX_ROUND:
            return f"it is of round {drawn.draw}, which there cannot be"
        bounds = [place for interval in drawn.unheard for place in interval]
        if bounds and (bounds[0] < 0 or bounds[-1] > self.num_slices or sorted(set(bounds)) != bounds):
            return f"it has slices {drawn.unheard[:10]} of a range with {self.num_slices}"
        try:
            self._checked = payload, self._decoded(payload, drawn)
        except MalformedPayload as problem:
            return f"it is nothing that {self.compression!r} writes: {problem}"
        return None

    def read(self, payload: memoryview, drawn: CodecRound) -> Floats:
        """The gradient that is in a payload that has been checked."""
        checked, self._checked = self._checked, None
        return checked[1] if checked is not None and checked[0] is payload else self._decoded(payload, drawn)

    def forget(self) -> None:
        """What has been checked and not read waits as it came: keep no second copy of it."""
        self._checked = None

    def written_values(self, values: Payload) -> Payload:
        """Values that servers step, on their way to a worker."""
        codec = codec_of_values(self.compression)
        if codec is None:
            return values
        floats = read_only.as_tensor(np.frombuffer(values, np.float32))
        written: Payload = codec.encode(floats, self.blocks(codec), RandomKeys()).numpy().data
        return written

    def _decoded(self, payload: memoryview, drawn: CodecRound) -> Floats:
        writing = writing_in(self.compression, drawn.draw)
        if writing is None:
            if payload.nbytes != 4 * self.numel:
                raise MalformedPayload(f"{payload.nbytes} bytes, not {4 * self.numel}")
            return np.frombuffer(payload, np.float32)
        codec, keys = writing.codec, RandomKeys.of_round(drawn.draw, 0)
        decoded: Floats = codec.decode(as_bytes(payload), self.blocks(codec), keys).numpy()
        return decoded


def as_bytes(payload: Payload) -> Tensor:
    """A copy: what comes off a wire can only be read, and may begin at any address."""
    return torch.from_numpy(np.frombuffer(payload, np.uint8).copy())


def encodings(
    ranges: Sequence[ParameterRange], parameters: Sequence[ServedParameter], codecs: Mapping[str, str]
) -> Callable[[int], RangeEncoding | None]:
    """How the gradients of each range come: `codecs` has the text of what a group's are compressed with, if they are."""
    check_shapes(parameters)
    blocks, known = RangeBlocks(ranges, parameters), {group: read_compression(text) for group, text in codecs.items()}

    def encoding_of(index: int) -> RangeEncoding | None:
        each = ranges[index]
        compression = known.get(each.group)
        if compression is None:
            return None
        return RangeEncoding(compression, lambda codec: blocks.of(index, codec), len(each.slices), each.numel)

    return encoding_of
