"""How codecs are measured: in one process and one thread, each call in turn with a copy of the same values.

    round k of each size and codec: copy, clone, encode, decode, encode_residual, add_decoded, exchange; the order rotated by k

Codecs are called as the engine calls them: with the same blocks in every round, whose memory payloads and decoded values are
written to again (`buffer_pool.py`). On the CPU two calls more, `encode_new` and `decode_new`, are given blocks that keep none.

A turn is a few calls, each on values of its own, so that the last call has not left them in a cache; one call, if it takes long.
Two rounds go before that do not count (compiling, memory, warm-ups); the second tells how many rounds the time limit allows. In
the first all workers of the exchange must end with the same bits. Values are Gaussian. On a GPU a turn begins and ends with the
device idle; decoders wait for it to say whether a payload is sound, and that counts.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stretto.bench.compress_gradients import KINDS, layout_of, values_of
from stretto.bench.compress_results import CompressReport, CompressRow, Quality, break_even_mbit, timing
from stretto.bench.compress_settings import CompressSettings, compression_of
from stretto.bench.compress_together import Spent, Together
from stretto.bench.machine import describe
from stretto.bench.settings import ELEMENT_BYTES, show_size
from stretto.bench.turns import Turn, check_device, now, take_turns, wait_for
from stretto.compress.buffer_pool import BufferPool
from stretto.compress.codec import Codec, Compression
from stretto.compress.layout import Blocks
from stretto.compress.none import NoCompression
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import JobError

CALLS = {"cpu": 2, "cuda": 8}  # of a turn
WARM_UP = 2  # rounds that do not count
LONG_S = 0.05  # a turn that has lasted so long has been long enough to be timed
DRAW = RandomKeys.of_round(1, rank=0)


class Vectors:
    """The vectors of one size. `sources` stay as they are; `spare` is what is written to."""

    def __init__(self, size: int, settings: CompressSettings, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.calls = CALLS[device.type]
        self.layout = layout_of(size // ELEMENT_BYTES)
        count = max(self.calls, settings.workers)
        self.sources = [values_of("gaussian", self.layout, seed, device) for seed in range(count)]
        self.spare = [torch.empty_like(source) for source in self.sources]

    def fill(self) -> None:
        for to, source in zip(self.spare, self.sources, strict=True):
            to.copy_(source)

    def timed(self, call: Callable[[int], object]) -> float:
        self.fill()
        wait_for(self.device)
        begin = time.perf_counter()
        for number in range(self.calls):
            call(number)
            if time.perf_counter() - begin > LONG_S:
                break
        wait_for(self.device)
        return (time.perf_counter() - begin) / (number + 1)


class TimedExchange:
    """Rounds of P workers, and what the last of them took."""

    def __init__(self, compression: Compression, word: str, vectors: Vectors, workers: int) -> None:
        self._together = Together(compression, vectors.layout, workers, vectors.device)
        self._vectors, self._word, self._workers = vectors, word, workers
        self.last: Spent | None = None

    def turn(self) -> float:
        self._vectors.fill()
        ends = self._vectors.spare[: self._workers]
        self.last, first = self._together.round(ends), self.last is None
        if first:
            self._together.end_warm_up()
            self._check(ends)
        return self.last.seconds

    def _check(self, ends: list[Tensor]) -> None:
        wrong = [rank for rank, end in enumerate(ends) if not torch.equal(end, ends[0])]
        if wrong:
            raise JobError(
                f"{self._word}: workers {wrong} end with other values than worker 0, so its speed means nothing.\n"
                f"This is a bug: please report it with the output of `stretto doctor`."
            )


def measure(settings: CompressSettings) -> CompressReport:
    check_device(settings.device)
    rows: list[CompressRow] = []
    with _one_thread():
        for size in settings.sizes:
            vectors = Vectors(size, settings, torch.device(settings.device))
            for word in settings.codecs:
                rows.append(measure_codec(word, settings, vectors))
                print(f"measured {word} on {show_size(size)}", file=sys.stderr, flush=True)
    return CompressReport(settings=settings, machine=describe(), date=now(), rows=rows)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_codec(word: str, settings: CompressSettings, vectors: Vectors) -> CompressRow:
    compression = compression_of(word)
    exchange = TimedExchange(compression, word, vectors, settings.workers)
    turns = copies(vectors) | turns_of(compression, vectors) | {"exchange": exchange.turn}
    seconds = alternate(turns, settings)
    assert exchange.last is not None
    copy_s = statistics.median(seconds["copy"])
    timings = {what: timing(vectors.size, each, copy_s) for what, each in seconds.items()}
    uncompressed = NoCompression().bytes_sent(vectors.layout, 0, settings.workers)
    payload_bytes = payload_of(compression, vectors)
    return CompressRow(
        size=vectors.size,
        codec=word,
        payload_bytes=payload_bytes,
        bits_per_value=8 * payload_bytes / vectors.layout.num_elements,
        bytes_sent=exchange.last.bytes_sent,
        bytes_uncompressed=uncompressed,
        copy=timings.pop("copy"),
        clone=timings.pop("clone"),
        exchange=timings["exchange"],
        break_even_mbit=break_even_mbit(uncompressed, exchange.last.bytes_sent, timings.pop("exchange").median),
        calls=timings,
        quality={kind: found for kind in KINDS if (found := quality_of(compression, kind, vectors)) is not None},
    )


def copies(vectors: Vectors) -> dict[str, Turn]:
    """Into memory that is there, and into new memory."""
    return {
        "copy": lambda: vectors.timed(lambda i: vectors.spare[i].copy_(vectors.sources[i])),
        "clone": lambda: vectors.timed(lambda i: vectors.sources[i].clone()),
    }


def turns_of(compression: Compression, vectors: Vectors) -> dict[str, Turn]:
    """What a codec does by itself. A majority vote leaves no residual; compressions that drive their own rounds have no calls."""
    if not isinstance(compression, Codec):
        return {}
    codec, blocks = compression, compression.blocks(vectors.layout)
    payloads = [codec.encode(source, blocks, DRAW) for source in vectors.sources[: vectors.calls]]
    calls: dict[str, Callable[[int], object]] = {
        "encode": lambda i: codec.encode(vectors.sources[i], blocks, DRAW),
        "decode": lambda i: codec.decode(payloads[i], blocks, DRAW),
        "encode_residual": lambda i: codec.encode_residual(vectors.spare[i], blocks, DRAW),
        "add_decoded": lambda i: codec.add_decoded(payloads[i], blocks, DRAW, vectors.spare[i]),
    }
    if codec.no_residual is not None:
        del calls["encode_residual"]
    if vectors.device.type == "cpu":  # on a GPU torch keeps memory by itself
        fresh = Blocks(blocks.bounds, blocks.keys, BufferPool(most=0))
        calls["encode_new"] = lambda i: codec.encode(vectors.sources[i], fresh, DRAW)
        calls["decode_new"] = lambda i: codec.decode(payloads[i], fresh, DRAW)
    return {what: lambda call=call: vectors.timed(call) for what, call in calls.items()}  # type: ignore[misc]


def alternate(turns: dict[str, Turn], settings: CompressSettings) -> dict[str, list[float]]:
    """The seconds of each contender in each round; fewer rounds than were asked for if they would take longer than the limit."""
    for _ in range(WARM_UP):
        begin = time.perf_counter()
        take_turns(list(turns.values()), 1)
        round_s = time.perf_counter() - begin
    rounds = min(settings.rounds, max(1, int(settings.limit_s / round_s)))
    return dict(zip(turns, take_turns(list(turns.values()), rounds), strict=True))


def payload_of(compression: Compression, vectors: Vectors) -> int:
    """What a worker gives to collectives in a round, after warm-ups, were it alone."""
    alone = Together(compression, vectors.layout, 1, vectors.device)
    alone.round([vectors.sources[0].clone()])
    alone.end_warm_up()
    return alone.round([vectors.sources[1].clone()]).bytes_given


def quality_of(compression: Compression, kind: str, vectors: Vectors) -> Quality | None:
    """How close a worker alone comes in its first round, if what it gets back is meant to be what it had."""
    alone = Together(compression, vectors.layout, 1, vectors.device)
    answers = [bucket.compression for bucket in alone.buckets]
    if any(answer.optimizer_hint is not None or answer.no_residual is not None for answer in answers):
        return None
    given = vectors.sources[0] if kind == "gaussian" else values_of(kind, vectors.layout, 0, vectors.device)
    got = given.clone()
    alone.round([got])
    error, length = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (given - got, given))
    return Quality(relative_error=error / length, contraction=1 - (error / length) ** 2)
