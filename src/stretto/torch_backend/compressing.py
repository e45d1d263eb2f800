"""Sums whose messages are encoded (`GroupOptions(compress=...)`): the exchanges of `stretto.compress`, in a process group.

All-reduce: the codec's own exchange, as with `Strategy(compress=...)` and one parameter, the buffer. Reduce-scatter: every member
encodes each part for the member that it is for, one all-to-all of payloads, and each adds up what it decodes, in the order of
ranks. So P - 1 payloads leave a member, where all-reduce sends about twice as much.

Compressed values must be finite. Whether they are on all members is found out beside the exchange, by a maximum of one number;
where they are not, the result is NaN throughout, as a sum with one NaN in each place would be: gradient scalers see it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.exchange import UnderWay
from stretto.collectives.messages import Name
from stretto.collectives.plan import Kind
from stretto.compress.codec import Codec
from stretto.compress.layout import Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext, Steps, Transpose
from stretto.compress.state import CompressionState
from stretto.torch_backend.exchanges import Exchanges
from stretto.torch_backend.naming import next_name, part_of
from stretto.torch_backend.operation import Operation

LEAST_ELEMENTS: Final = 1024  # shorter ones are counts and norms, and cost a message in any case
FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
KEPT_LENGTHS: Final = 64


class CompressedSums:
    """Compressed sums in one process group.

    `algorithm`: for payloads that add up, by their length; `named`: the one that the options name."""

    def __init__(self, exchanges: Exchanges, codec: Codec, named: str | None, algorithm: Callable[[int], str]) -> None:
        self._exchanges = exchanges
        self._group = exchanges.group
        self._codec = codec
        self._named = named or "auto"
        self._algorithm = algorithm
        self._kept: dict[tuple[int, torch.device], ExchangeContext] = {}

    def takes(self, tensors: Sequence[Tensor], op: str) -> bool:
        """Whether these are compressed: the same on all members, for it follows from what is asked for."""
        length = sum(tensor.numel() for tensor in tensors)
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            return False  # which is refused, as it is without a codec
        return self._group.size > 1 and op in ("sum", "mean") and tensors[0].dtype in FLOATS and length >= LEAST_ELEMENTS

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> Operation:
        values = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
        name = next_name(self._group)
        context = self._context(values, name)

        def steps() -> Steps:
            yield from self._codec.exchange(values, context)
            if op == "sum":
                values.mul_(self._group.size)

        return self._run(steps(), values, values, tensors, name)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> Operation:
        codec, group = self._codec, self._group
        parts = torch.cat([tensor.detach().reshape(-1).float() for tensor in inputs]).view(group.size, -1)
        name = next_name(group)
        mine = parts[group.rank]

        def steps() -> Steps:
            blocks = self._context(mine, name).blocks_of(codec)
            rows = torch.stack([codec.encode(part, blocks, _keys(name, to, group.rank)) for to, part in enumerate(parts)])
            arrived = yield Transpose(rows)
            mine.zero_()
            for source, row in enumerate(arrived):
                codec.add_decoded(row, blocks, _keys(name, group.rank, source), mine)
            if op == "mean":
                mine.mul_(1.0 / group.size)

        return self._run(steps(), parts, mine, [output], name)

    def _run(self, steps: Steps, values: Tensor, combined: Tensor, outputs: Sequence[Tensor], name: Name) -> Operation:
        """`values` are what is encoded, `combined` what becomes of them."""
        algorithm = self._algorithm(combined.nbytes) if self._named == "auto" else self._named

        def whole() -> UnderWay:
            bad = torch.tensor([float(not bool(values.isfinite().all()))], device="cpu")
            if bad:
                values.nan_to_num_(0.0, 0.0, 0.0)
            found = self._group.start(
                Kind.ALL_REDUCE, bad, "butterfly", op="max", name=part_of(name, 1), label=" of what is encoded"
            )
            yield from self._exchanges.drive(steps, name, algorithm, f" with compress={self._codec!r}")
            yield found
            if bad:
                combined.fill_(torch.nan)
            start = 0
            for output in outputs:
                output.detach().copy_(combined[start : start + output.numel()].view(output.shape))
                start += output.numel()

        return Operation([self._exchanges.submit(whole, combined.device)], outputs, None, name)

    def _context(self, values: Tensor, name: Name) -> ExchangeContext:
        """What is known of exchanges of this length is kept: their blocks, mostly."""
        key = (values.numel(), values.device)
        if key not in self._kept:
            if len(self._kept) >= KEPT_LENGTHS:
                self._kept.clear()
            layout = Layout.of([("buffer", (values.numel(),))])
            self._kept[key] = ExchangeContext(layout, CompressionState(layout, values.device))
        known, group = self._kept[key], self._group
        keys = _keys(name, 0, group.rank)
        return ExchangeContext(known.layout, known.state, keys, group.rank, group.size, self._named, known.kept)


def _keys(name: Name, part: int, source: int) -> RandomKeys:
    """The random keys for what the member at place `source` encodes for the member at place `part`."""
    return RandomKeys.of_round(zlib.crc32(repr((name, part)).encode()), source)
