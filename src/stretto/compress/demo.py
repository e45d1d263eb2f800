"""DeMo: workers keep their own momentum and exchange only its strongest frequencies.

    m = decay m + g                    each worker, with its own gradient
    X = DCT of m, chunk by chunk       `cosine.py`: chunks of at most `chunk` x `chunk`
    S = the k largest |X| of a chunk   of equal ones the lower frequency; q = inverse DCT of X on S
    m = m - q                          what was not sent stays
    gather (S, X on S); a coefficient is the mean over the workers that sent it; inverse DCT; sign

Bytes:      6 min(k, c0 c1) for each chunk of c0 x c1, (P - 1) times. Layout: all values (float32), then all positions in their
            chunks (uint16, strictly ascending within a chunk), tensors and chunks in order. k = 32, chunk = 64: 85 times less
            than float32 for a matrix whose sides divide by 64; 3 bytes per value for a vector. A side that is a large prime makes
            chunks one element wide, and of chunks no larger than k everything is sent, at 6 bytes a value.
            It is gathered, so what arrives grows with P.
Invariant:  m + q is what m was before, per worker, up to rounding. With k = chunk * chunk, m is zero after every round and the
            result is the sign of the mean. All workers add in the order of ranks, from the same bytes, and end with the same bits
            (as far as their matrix products round alike: machines of one kind).
Memory:     8 bytes per parameter (the momentum, and the next one until the round has ended well everywhere).
Optimizer:  SGD without momentum; with `sign` the learning rate is the size of each step, as for Adam and signSGD.
Reference:  Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870. Departs from its code: the
            learning rate stays outside of m, so m is in units of the gradient and a schedule does not reweigh what is left from
            before (with a constant rate and `sign` it is the same method); 16-bit positions instead of 64; the mean adds in the
            order of ranks; a chunk in which a worker has only zeros counts as not sent, where they would have been averaged in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stretto.compress.checks import check, is_count, is_number
from stretto.compress.codec import Compression
from stretto.compress.cosine import ChunkedCosine
from stretto.compress.exchange import blamed_on
from stretto.compress.layout import Layout, TensorPlace
from stretto.compress.rounds import ExchangeContext, Gather, Steps
from stretto.errors import MalformedPayload

MOMENTUM = "momentum"
MAX_CHUNK = 256  # squared, the most positions that 16 bits can tell apart
LARGEST_MOMENTUM = 2.0**100  # a chunk's frequencies may be 256 times as large, and sums of them must stay finite
LARGEST_VALUE = 2.0**109


@dataclass(frozen=True, slots=True)
class DeMo(Compression):
    """`k`: frequencies sent of each chunk. `chunk`: its sides at most. `decay`: of the momentum. `sign`: hand out signs."""

    k: int = 32
    chunk: int = 64
    decay: float = 0.999
    sign: bool = True
    optimizer_hint: ClassVar[str | None] = (
        "torch.optim.SGD(model.parameters(), lr=...)  # DeMo brings its own momentum; weight_decay here is decoupled, as in AdamW"
    )
    flat_kinds: ClassVar[frozenset[str]] = frozenset((MOMENTUM,))

    def __post_init__(self) -> None:
        check(is_count(self.k), self, "k", "so many frequencies of a chunk are sent, 1 or more", "DeMo(k=32)")
        why = f"the sides of a chunk are 1 to {MAX_CHUNK}, so that 16 bits can say which frequency it is"
        check(is_count(self.chunk) and self.chunk <= MAX_CHUNK, self, "chunk", why, "DeMo(chunk=64)")
        decays = is_number(self.decay) and 0 <= self.decay <= 1
        check(decays, self, "decay", "momentum decays by a factor of 0 to 1", "DeMo(decay=0.999)")
        check(isinstance(self.sign, bool), self, "sign", "it is a yes or a no", "True or False")

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        frequencies = context.keep(self, lambda: Frequencies(context.layout, self.k, self.chunk, values.device))
        own = context.state.own
        momentum = torch.mul(own.flat(MOMENTUM), self.decay, out=own.next_flat(MOMENTUM)).add_(values)
        momentum.clamp_(-LARGEST_MOMENTUM, LARGEST_MOMENTUM)
        spectrum = frequencies.forward(momentum)
        positions = frequencies.strongest(spectrum)
        sent = torch.zeros_like(spectrum)
        sent[positions] = spectrum[positions]
        momentum.sub_(frequencies.inverse(sent))
        rows = yield Gather(frequencies.pack(spectrum, positions))
        values.copy_(frequencies.inverse(self._mean(rows, frequencies)))
        if self.sign:
            values.sign_()

    def _mean(self, rows: Tensor, frequencies: Frequencies) -> Tensor:
        total = torch.zeros(frequencies.num_elements, device=rows.device, dtype=torch.float32)
        senders = torch.zeros_like(total)
        for rank, row in enumerate(rows):
            with blamed_on(rank, repr(self)):
                frequencies.add_unpacked(row, total, senders)
        return total.div_(senders.clamp_(min=1))

    def refusal(self, algorithm: str) -> str | None:
        return f"each worker sends other frequencies, and {algorithm!r} adds what it carries"

    @property
    def hands_out(self) -> Literal["mean", "direction"]:  # type: ignore[override]
        return "direction" if self.sign else "mean"

    @property
    def no_abstention(self) -> str | None:  # type: ignore[override]
        return None if self.sign else "its mean is over those who sent something, and would be weighted again"

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int:
        return (world_size - 1) * Frequencies(layout, self.k, self.chunk, torch.device("cpu")).num_bytes


class Frequencies:
    """The chunks of a bucket's tensors as frequencies: one flat vector, chunk after chunk, each tensor where it was.

    Of each chunk min(k, its size) coefficients are sent: the *slots*, in order. Element s of `_chunk`, `_start` and `_size` is
    the number of slot s's chunk, where that begins, and how many coefficients it has.
    """

    def __init__(self, layout: Layout, k: int, chunk: int, device: torch.device) -> None:
        self._tensors = [(place, ChunkedCosine(place.shape, chunk, device)) for place in layout.places]
        self._k = k
        self.num_elements = layout.num_elements
        self._num_chunks = sum(cosine.num_chunks for _, cosine in self._tensors)
        starts = [
            torch.arange(place.start, place.stop, cosine.size, dtype=torch.int64, device="cpu") for place, cosine in self._tensors
        ]
        sizes = [torch.full((cosine.num_chunks,), cosine.size, dtype=torch.int64, device="cpu") for _, cosine in self._tensors]
        start, size = (torch.cat([torch.arange(0, dtype=torch.int64, device="cpu"), *vectors]) for vectors in (starts, sizes))
        self._chunk = torch.repeat_interleave(
            torch.arange(self._num_chunks, dtype=torch.int64, device="cpu"), size.clamp(max=k)
        ).to(device)
        self._start, self._size = start.to(device)[self._chunk], size.to(device)[self._chunk]

    @property
    def num_bytes(self) -> int:
        return 6 * len(self._chunk)

    def forward(self, values: Tensor) -> Tensor:
        return self._each(values, lambda place, cosine: cosine.forward(values[place.start : place.stop]))

    def inverse(self, spectrum: Tensor) -> Tensor:
        return self._each(spectrum, lambda place, cosine: cosine.inverse(_rows(spectrum, place, cosine)))

    def _each(self, like: Tensor, transform: Callable[[TensorPlace, ChunkedCosine], Tensor]) -> Tensor:
        out = torch.empty_like(like)
        for place, cosine in self._tensors:
            out[place.start : place.stop] = transform(place, cosine).view(-1)
        return out

    def strongest(self, spectrum: Tensor) -> Tensor:
        """Where the coefficients to send lie, ascending."""
        chosen = [torch.arange(0, device=spectrum.device, dtype=torch.int64)]
        chosen += [largest(_rows(spectrum, place, cosine), self._k).view(-1) for place, cosine in self._tensors]
        return torch.cat(chosen) + self._start

    def pack(self, spectrum: Tensor, positions: Tensor) -> Tensor:
        index = (positions - self._start).to(torch.int16)  # wraps above 32767, which leaves the bits of a uint16
        return torch.cat([spectrum[positions].view(torch.uint8), index.view(torch.uint8)])

    def add_unpacked(self, payload: Tensor, total: Tensor, senders: Tensor) -> None:
        """total += the coefficients of a payload; senders += 1 where it has one."""
        positions, values = self.unpack(payload)
        total[positions] += values  # no position comes twice, so this adds, in the same order everywhere
        alive = torch.zeros(self._num_chunks, dtype=torch.bool, device=payload.device)
        alive[self._chunk[values != 0]] = True
        senders[positions] += alive[self._chunk]

    def unpack(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        if len(payload) != self.num_bytes:
            raise MalformedPayload(f"{len(payload)} bytes where {self.num_bytes} must come")
        values, index = payload[: 4 * len(self._chunk)].clone(), payload[4 * len(self._chunk) :].clone()
        values = values.view(torch.float32)  # cloned before: a row of a gathered table need not be aligned
        positions = index.view(torch.int16).long() & 0xFFFF
        if not bool((values.abs() <= LARGEST_VALUE).all()):
            raise MalformedPayload(f"a frequency that is not finite, or larger than {LARGEST_VALUE:g}")
        if not bool((positions < self._size).all()):
            raise MalformedPayload("a position beyond the end of its chunk")
        positions += self._start
        if not bool((positions.diff() > 0).all()):
            raise MalformedPayload("positions that do not ascend")
        return positions, values


def largest(rows: Tensor, k: int) -> Tensor:
    """For each row where its k largest magnitudes are (all, if it has no more), ascending; of equal ones those that come first.

    Magnitude and position make one number, so there are no ties for `topk` to break, which it does differently by device.
    """
    backwards = torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device, dtype=torch.int64)
    keys = (rows.abs().view(torch.int32).long() << 16) | backwards  # bits of non-negative floats are ordered as they are
    chosen = keys.topk(min(k, rows.shape[1]), dim=1, sorted=False).values & 0xFFFF
    return (rows.shape[1] - 1 - chosen).sort(dim=1).values


def _rows(spectrum: Tensor, place: TensorPlace, cosine: ChunkedCosine) -> Tensor:
    return spectrum[place.start : place.stop].view(cosine.num_chunks, cosine.size)
