"""How payloads meet. Five exchanges; n values, P workers, a payload of L bytes each:

    summed      payloads are numbers that add up; any all-reduce             about 2 L (P-1)/P sent per worker
    gathered    everybody gets every payload and adds what it decodes        L (P-1)
    two-phase   blocks are shared out: each worker gets everybody's          2 L (P-1)/P
                payloads of its blocks, adds them up, encodes the mean
                anew, and all gather that
    in hops     ring or halving-doubling that decodes, adds and encodes      2 L (P-1)/P
                anew at every hop
    served      servers do as a worker does with its blocks in two-phase     L, and L comes back

All add in the order of ranks, from the same bytes: all workers end with the same bits. Two-phase encodes twice, in hops up to P
times, where gathering encodes once: up to P = 2 gathering is as cheap and loses less, so it is used there.

Payloads whose length depends on the values are gathered after their lengths (8 bytes each), padded to the longest.

Memory:     what a round is computed in is kept for the next one (`buffer_pool.py`) where it is 1 MiB or more: summed L, gathered
            (P + 1) L, two-phase L + (2 L + 4 n) / P bytes. Not kept: payloads whose length depends on the values.

References: two-phase: Tang et al., "1-bit Adam", ICML 2021, section 5 (there with one scale per worker and chunk). Departs from
it: chunks are whole blocks, so what is computed does not depend on which worker computes it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stretto.collectives import catalogue
from stretto.collectives.message_codec import MessageCodec
from stretto.collectives.plan import Kind
from stretto.collectives.schedule import Action, compile_plan
from stretto.compress.buffer_pool import BufferPool
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import Collective, ExchangeContext, Gather, Serve, Steps, Sum, SumInHops, Transpose, share_out
from stretto.compress.state import SERVER
from stretto.errors import FrameError, MalformedPayload

if TYPE_CHECKING:
    from stretto.compress.codec import Codec

HOP_ALGORITHMS = ("ring", "halving_doubling")


class Feedback(NamedTuple):
    """The residuals of error feedback in one round. `residual`: on entry what is to be sent, on return what was not.

    `server`: the part of the second phase's residual that this worker keeps (its own blocks), and `next_server` its successor.
    """

    residual: Tensor
    server: Tensor | None = None
    next_server: Tensor | None = None


def exchange(codec: Codec, values: Tensor, context: ExchangeContext, feedback: Feedback | None = None) -> Steps:
    """Replace `values` by the mean over workers of their decoded payloads. With `feedback`, its residual is what is encoded."""
    if context.served is not None:
        yield from _served(codec, values, context, feedback)
    elif codec.payload_dtype is not None:
        yield from _summed(codec, values, context, feedback)
    elif context.algorithm in HOP_ALGORITHMS and codec.hop() is not None and context.world_size > 1:
        assert feedback is None
        yield from _in_hops(codec, values, context)
    elif uses_two_phases(codec, context.world_size):
        yield from _two_phase(codec, values, context, feedback)
    else:
        yield from _gathered(codec, values, context, feedback)


def feedback_of(codec: Codec, residual: Tensor, context: ExchangeContext) -> Feedback:
    """What error feedback gives to the exchange of this round, from the worker's own state and back into it."""
    if context.served is not None or not combines_blocks(codec, context.world_size):
        return Feedback(residual)
    own, mine = context.state.own, context.shares_of(codec)[context.rank]
    return Feedback(residual, own.flat(SERVER, mine.start, mine.stop), own.next_flat(SERVER))


def combines_blocks(codec: Codec, world_size: int) -> bool:
    """Whether workers share the blocks out, and so keep a second residual."""
    return codec.payload_dtype is None and uses_two_phases(codec, world_size)


def refusal_with_feedback(codec: Codec, algorithm: str) -> str | None:
    """Why error feedback around the codec does not go with this all-reduce, or None."""
    if codec.hop() is not None and algorithm in HOP_ALGORITHMS:
        return f"{algorithm!r} encodes sums of several workers' values, whose error belongs to none of them"
    return codec.refusal(algorithm)


def uses_two_phases(codec: Codec, world_size: int) -> bool:
    return codec.splits and world_size > 2


def _summed(codec: Codec, values: Tensor, context: ExchangeContext, feedback: Feedback | None) -> Steps:
    """Divided by P before, not after: a sum of P half-precision numbers may be too large for one."""
    blocks, size = context.blocks_of(codec), context.world_size
    codec = codec.among(size)
    source = values if feedback is None else feedback.residual
    source.mul_(1.0 / size)
    payload = _encode(codec, source, blocks, context.random, feedback)
    if feedback is not None:
        source.mul_(size)
    assert codec.payload_dtype is not None
    total = yield Sum(payload.view(codec.payload_dtype))
    codec.add_decoded(total.view(torch.uint8), blocks, context.random, values.zero_())


def _in_hops(codec: Codec, values: Tensor, context: ExchangeContext) -> Steps:
    hop = codec.hop()
    assert hop is not None
    values.copy_((yield SumInHops(values, hop)))
    values.mul_(1.0 / context.world_size)


def _gathered(codec: Codec, values: Tensor, context: ExchangeContext, feedback: Feedback | None) -> Steps:
    blocks = context.blocks_of(codec)
    payload = _encode(codec, values if feedback is None else feedback.residual, blocks, context.random, feedback)
    if codec.num_bytes(blocks) is None:  # other lengths in every round: not worth keeping
        rows = yield from gather_payloads(payload, codec.max_bytes(blocks), repr(codec))
    else:
        rows = list((yield Gather(payload, blocks.pool.empty((context.world_size, len(payload)), torch.uint8, payload.device))))
    values.zero_()
    for rank, row in enumerate(rows):
        _add(codec, row, blocks, context.random, values, rank)
    values.mul_(1.0 / context.world_size)


def gather_payloads(payload: Tensor, longest: int, name: str) -> Generator[Collective, Tensor, list[Tensor]]:
    """Everybody's, of whatever length: padded to the longest, after the lengths. These decide how much memory is taken, so none
    may announce more than a payload can need."""
    told = yield Gather(torch.tensor([len(payload)], dtype=torch.int64, device="cpu"))
    lengths = [int(length) for length in told.flatten()]
    for rank, length in enumerate(lengths):
        if not 0 <= length <= longest:
            raise FrameError(rank, f"{name}: it announces {length} bytes where at most {longest} can come")
    rows = yield Gather(functional.pad(payload, (0, max(lengths) - len(payload))))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


@contextmanager
def blamed_on(rank: int, name: str) -> Iterator[None]:
    """What is malformed is that worker's fault."""
    try:
        yield
    except MalformedPayload as problem:
        raise FrameError(rank, f"{name}: {problem}") from problem


def _two_phase(codec: Codec, values: Tensor, context: ExchangeContext, feedback: Feedback | None) -> Steps:
    shares, mine = context.shares_of(codec), context.shares_of(codec)[context.rank]
    lengths = [_length(codec, share.blocks) for share in shares]
    source = values if feedback is None else feedback.residual
    pool = mine.blocks.pool
    rows = pool.empty((context.world_size, max(lengths)), torch.uint8, values.device)
    for row, share, length in zip(rows, shares, lengths, strict=True):
        row[:length] = _encode(codec, source[share.start : share.stop], share.blocks, context.random, feedback)
        row[length:] = 0
    arrived = yield Transpose(rows)
    total = pool.empty(mine.stop - mine.start, torch.float32, values.device).zero_()
    for rank in range(context.world_size):
        _add(codec, arrived[rank, : lengths[context.rank]], mine.blocks, context.random, total, rank)
    total.mul_(1.0 / context.world_size)
    encoded = _encode_mean(codec, total, mine.blocks, context.random.again(), feedback)
    combined = yield Gather(_padded(encoded, max(lengths), pool), rows)  # which every worker has read by now
    for rank, (share, length) in enumerate(zip(shares, lengths, strict=True)):
        part = values[share.start : share.stop].zero_()
        _add(codec, combined[rank, :length], share.blocks, context.random.again(), part, rank)


def _served(codec: Codec, values: Tensor, context: ExchangeContext, feedback: Feedback | None) -> Steps:
    assert context.served is not None
    parts, source = context.served(codec), values if feedback is None else feedback.residual
    keys = keys_of_reply(codec, context.random)

    def take(number: int, reply: Tensor) -> None:
        start, stop, blocks = parts[number]
        codec.add_decoded(reply, blocks, keys, values[start:stop].zero_())

    yield Serve((_encode(codec, source[start:stop], blocks, context.random, feedback) for start, stop, blocks in parts), take)


def keys_of_reply(codec: Codec, random: RandomKeys) -> RandomKeys:
    """With which random numbers a server writes the mean. Where payloads add up, their sum has the form of a payload: chosen
    elements are those that workers have chosen."""
    return random if codec.payload_dtype is not None else random.again()


def _encode(codec: Codec, values: Tensor, blocks: Blocks, random: RandomKeys, feedback: Feedback | None) -> Tensor:
    return codec.encode(values, blocks, random) if feedback is None else codec.encode_residual(values, blocks, random)


def _encode_mean(codec: Codec, mean: Tensor, blocks: Blocks, random: RandomKeys, feedback: Feedback | None) -> Tensor:
    if feedback is None or feedback.server is None or feedback.next_server is None:
        return codec.encode(mean, blocks, random)
    torch.add(mean, feedback.server, out=feedback.next_server)
    return codec.encode_residual(feedback.next_server, blocks, random)


def _add(codec: Codec, payload: Tensor, blocks: Blocks, random: RandomKeys, total: Tensor, rank: int) -> None:
    with blamed_on(rank, repr(codec)):
        codec.add_decoded(payload, blocks, random, total)


def _padded(payload: Tensor, length: int, pool: BufferPool) -> Tensor:
    if len(payload) == length:
        return payload
    row = pool.empty(length, torch.uint8, payload.device)
    row[: len(payload)] = payload
    row[len(payload) :] = 0
    return row


def _length(codec: Codec, blocks: Blocks) -> int:
    length = codec.num_bytes(blocks)
    assert length is not None, "a codec that splits has payloads of a known length"
    return length


def bytes_sent(codec: Codec, blocks: Blocks, rank: int, world_size: int, algorithm: str) -> int | None:
    """Payload bytes that a worker sends in one round; None if it depends on the values."""
    length = codec.num_bytes(blocks)
    if world_size == 1 or length is None:
        return 0 if world_size == 1 else None
    if codec.payload_dtype is not None:
        return bytes_of_sum(length // codec.payload_dtype.itemsize, codec.payload_dtype.itemsize, rank, world_size, algorithm)
    if algorithm in HOP_ALGORITHMS and (hop := codec.hop()) is not None:
        return _bytes_in_hops(hop, blocks.num_elements, rank, world_size, algorithm)
    if uses_two_phases(codec, world_size):
        longest = max(_length(codec, share.blocks) for share in share_out(blocks, world_size))
        return 2 * (world_size - 1) * longest
    return (world_size - 1) * length


def _bytes_in_hops(hop: MessageCodec, num_elements: int, rank: int, world_size: int, algorithm: str) -> int:
    """Every message is a whole number of units; the last unit may be shorter."""
    num_units = -(-num_elements // hop.unit)
    tasks = compile_plan(catalogue.plan(Kind.ALL_REDUCE, algorithm, rank, world_size), num_units, num_units or 1).tasks
    sends = [task for task in tasks if task.action is Action.SEND]
    return sum(hop.num_bytes(min(task.stop * hop.unit, num_elements) - task.start * hop.unit) for task in sends)


def bytes_of_sum(num_elements: int, itemsize: int, rank: int, world_size: int, algorithm: str) -> int:
    """What that rank sends in an all-reduce, from its plan. For "auto": as by ring, which none undercuts for large vectors."""
    plan = catalogue.plan(Kind.ALL_REDUCE, "ring" if algorithm == "auto" else algorithm, rank, world_size)
    return sum(elements for _, elements in compile_plan(plan, num_elements, num_elements or 1).sent) * itemsize
