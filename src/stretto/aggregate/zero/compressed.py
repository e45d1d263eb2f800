"""Codecs on the two halves: gradients that are reduce-scattered, and stepped weights that are gathered.

    gradients   every worker encodes what it has of each slice and sends it to the slice's owner, who decodes and adds up: the
                first phase of the two-phase exchange (`compress/exchange.py`), and no second one. What error feedback keeps is
                each worker's own residual, of what it has sent
    weights     the owner steps weights that are not rounded (in float32, its own) and sends them encoded; everybody decodes the
                same bytes, the owner too, so all have the same model

A slice of a bucket whose gradients are compressed ends where a block of the codec does. Blocks of weights are counted from the
beginning of each piece. Rounding of weights does not add up: what is sent is the weight and not a change of it.

Bytes:      L (P-1)/P each way, L the length of the payload of the whole bucket, to one block per worker.
References: gradients: Tang et al., "1-bit Adam", ICML 2021, section 5; weights: Wang et al., "ZeRO++", arXiv:2306.10209, section
            3.1 (which gathers them for the forward of stage 3, as is done here at that stage).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.exchange import MeanOfMine, Steps
from stretto.aggregate.zero.slices import SliceBounds
from stretto.compress.by_parameter import ByParameter
from stretto.compress.codec import Codec, Compression
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.exchange import blamed_on
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext, Gather, Transpose
from stretto.compress.sixteen_bits import SixteenBits


def fault_of_gradients(compress: Compression) -> str | None:
    """Why gradients that are so compressed cannot be reduce-scattered, or None."""
    if compress.lossless:
        return None
    if isinstance(compress, ByParameter):
        return next((reason for _, each in compress.rules if (reason := fault_of_gradients(each)) is not None), None)
    codec = compress.codec if isinstance(compress, ErrorFeedback) else compress
    if isinstance(codec, SixteenBits):
        return None
    if not isinstance(codec, Codec) or not codec.splits:
        return f"a payload of {codec!r} is of whole tensors, and a worker gets a slice, which ends anywhere in one"
    if codec.hands_out != "mean":
        return f"{codec!r} gives a direction and not a mean, which is made of everybody's votes"
    return None


def fault_of_weights(codec: Compression) -> str | None:
    """Why stepped weights cannot be sent so, or None."""
    if isinstance(codec, ErrorFeedback):
        return "what is sent is the weight itself, of which the owner has the unrounded one: there is no error to feed back"
    if not isinstance(codec, Codec) or not (codec.splits or isinstance(codec, SixteenBits)):
        return "a payload of it is of whole tensors, or of some of their elements, and weights travel in slices, whole"
    if codec.wants_feedback or codec.hands_out != "mean":
        return "it keeps too little of a weight: the model would not be the one that is trained"
    return None


def bounds_for(compress: Compression, layout: Layout, rank: int, size: int) -> SliceBounds:
    """Slices for a bucket whose parameters are so compressed: of whole blocks."""
    codec = compress.codec if isinstance(compress, ErrorFeedback) else compress
    if compress.lossless or not isinstance(codec, Codec) or isinstance(codec, SixteenBits):
        return SliceBounds.even(layout.num_elements, rank, size)
    blocks = codec.blocks(layout)
    edges = blocks.bounds.tolist()
    return SliceBounds((*(edges[first] for first, _ in blocks.split(size)), edges[-1]), rank)


def scattered(compress: Compression, values: Tensor, context: ExchangeContext, bounds: SliceBounds) -> Steps:
    """This worker's slice of `values` becomes the mean over workers of their decoded payloads."""
    source, codec, residual = values, compress, None
    if isinstance(compress, ErrorFeedback):
        own = context.state.own
        source = residual = torch.add(values, own.flat(RESIDUAL), out=own.next_flat(RESIDUAL))
        codec = compress.codec
    assert isinstance(codec, Codec)
    if isinstance(codec, SixteenBits):
        yield from _summed(codec, values, source, context, bounds, feedback=residual is not None)
    else:
        yield from _from_all(codec, values, source, context, feedback=residual is not None)


def _summed(
    codec: SixteenBits, values: Tensor, source: Tensor, context: ExchangeContext, bounds: SliceBounds, *, feedback: bool
) -> Steps:
    """Payloads that add up, a number for each value: divided by P before, as in an all-reduce of them."""
    blocks, size = context.blocks_of(codec), context.world_size
    among = codec.among(size)
    source.mul_(1.0 / size)
    payload = (among.encode_residual if feedback else among.encode)(source, blocks, context.random)
    if feedback:
        source.mul_(size)
    total = payload.view(codec.payload_dtype)
    yield MeanOfMine(total, op="sum")
    mine = slice(bounds.start, bounds.stop)
    values[mine] = total[mine].float()


def _from_all(codec: Codec, values: Tensor, source: Tensor, context: ExchangeContext, *, feedback: bool) -> Steps:
    shares, mine = context.shares_of(codec), context.shares_of(codec)[context.rank]
    lengths = [codec.max_bytes(share.blocks) for share in shares]
    rows = mine.blocks.pool.empty((context.world_size, max(lengths)), torch.uint8, values.device)
    for row, share, length in zip(rows, shares, lengths, strict=True):
        part = source[share.start : share.stop]
        row[:length] = (codec.encode_residual if feedback else codec.encode)(part, share.blocks, context.random)
        row[length:] = 0
    arrived = yield Transpose(rows)
    total = values[mine.start : mine.stop].zero_()
    for rank in range(context.world_size):
        with blamed_on(rank, repr(codec)):
            codec.add_decoded(arrived[rank, : lengths[context.rank]], mine.blocks, context.random, total)
    total.mul_(1.0 / context.world_size)


class EncodedWeights:
    """How the weights of one bucket are sent: the blocks of every worker's slice."""

    def __init__(self, codec: Codec, layout: Layout, bounds: SliceBounds) -> None:
        self._codec = codec
        self._bounds = bounds
        self._blocks: list[Blocks] = []
        for start, stop in zip(bounds.bounds, bounds.bounds[1:], strict=False):
            pieces = [
                (place.name, (min(stop, place.stop) - max(start, place.start),))
                for place in layout.places
                if max(start, place.start) < min(stop, place.stop)
            ]
            self._blocks.append(codec.blocks(Layout.of(pieces)))
        self._lengths = [codec.max_bytes(blocks) if len(blocks) else 0 for blocks in self._blocks]

    def steps(self, mine: Tensor, flat: Tensor, number: int) -> Steps:
        """`mine`: this worker's slice, float32. `flat` becomes what everybody's decode to. A program that evaluates in inference
        mode may ask for it there, and codecs keep their memory."""
        rank, codec = self._bounds.rank, self._codec
        with torch.inference_mode(False), torch.no_grad():
            row = torch.zeros(max(self._lengths), dtype=torch.uint8, device=flat.device)
            if self._lengths[rank]:
                row[: self._lengths[rank]] = codec.encode(mine, self._blocks[rank], RandomKeys.of_round(number, rank))
        rows = yield Gather(row)
        with torch.inference_mode(False), torch.no_grad():
            for owner, (blocks, length) in enumerate(zip(self._blocks, self._lengths, strict=True)):
                if length:
                    with blamed_on(owner, repr(codec)):
                        part = codec.decode(rows[owner, :length], blocks, RandomKeys.of_round(number, owner))
                    flat[self._bounds.bounds[owner] : self._bounds.bounds[owner + 1]] = part
