"""P workers' exchanges in one process: what a worker computes in a round, without the network.

The workers' generators run side by side; each collective that they ask for is carried out on their tensors. What is timed is the
inside of the generators alone, so encoding, decoding, adding and orthonormalising count, and carrying out the collectives does
not. Of a sum that is all there is to it: an all-reduce adds on its way, for codecs as for no compression.

Tensors are put into buckets by what the compression answers for each of them, as the engine does, but without a limit: there is
one bucket for each answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.bench.turns import wait_for
from stretto.compress.codec import Compression
from stretto.compress.exchange import bytes_of_sum
from stretto.compress.layout import Layout, TensorPlace
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import Collective, ExchangeContext, Gather, Steps, Sum, SumInHops, Transpose
from stretto.compress.state import CompressionState

PAST_WARM_UP = 1_000_000  # rounds, after which every warm-up is over


class Spent(NamedTuple):
    """One round: how long a worker computed (the mean over all), and the most bytes that one gave to collectives, and sent."""

    seconds: float
    bytes_given: int
    bytes_sent: int


class SharedBucket:
    """The tensors with one answer, of all workers: `places` in the whole vector, `layout` in the bucket."""

    def __init__(self, compression: Compression, places: list[TensorPlace], size: int, device: torch.device) -> None:
        self.compression = compression
        self.places = places
        self.layout = Layout.of((place.name, place.shape) for place in places)
        self.states = [CompressionState(self.layout, device) for _ in range(size)]
        self.kept: list[dict[Any, Any]] = [{} for _ in range(size)]

    def take(self, whole: Tensor) -> Tensor:
        return torch.cat([whole[place.start : place.stop] for place in self.places])

    def put(self, values: Tensor, whole: Tensor) -> None:
        for place, mine in zip(self.places, self.layout.places, strict=True):
            whole[place.start : place.stop] = values[mine.start : mine.stop]


class Together:
    """`round` takes the workers' gradients, replaces them by what each ends up with, and commits their state."""

    def __init__(self, compression: Compression, layout: Layout, size: int, device: torch.device) -> None:
        answers: dict[Compression, list[TensorPlace]] = {}
        for place in layout.places:
            answers.setdefault(compression.for_parameter(place.name, place.shape), []).append(place)
        self.buckets = [SharedBucket(answer, places, size, device) for answer, places in answers.items()]
        self._size = size
        self._device = device
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        self._seconds = 0.0
        self._given, self._sent = [0] * self._size, [0] * self._size

    def end_warm_up(self) -> None:
        """From now on compress as in the middle of training. Run a round before: a warm-up may leave something that is needed."""
        for state in (state for bucket in self.buckets for state in bucket.states):
            state.rounds = max(state.rounds, PAST_WARM_UP)

    def round(self, gradients: Sequence[Tensor]) -> Spent:
        self._begin()
        for bucket in self.buckets:
            values = [bucket.take(gradient) for gradient in gradients]
            turns = [self._turn(bucket, rank) for rank in range(self._size)]
            self._drive([bucket.compression.exchange(value, turn) for value, turn in zip(values, turns, strict=True)])
            for value, gradient in zip(values, gradients, strict=True):
                bucket.put(value, gradient)
            for state in bucket.states:
                state.commit()
        self._number += 1
        return Spent(self._seconds / self._size, max(self._given), max(self._sent))

    def _turn(self, bucket: SharedBucket, rank: int) -> ExchangeContext:
        draw = RandomKeys.of_round(self._number, rank)
        return ExchangeContext(bucket.layout, bucket.states[rank], draw, rank, self._size, kept=bucket.kept[rank])

    def _drive(self, workers: list[Steps]) -> None:
        asked = [self._advance(worker, None) for worker in workers]
        while asked[0] is not None:
            results = self._carry_out(asked)
            asked = [self._advance(worker, result) for worker, result in zip(workers, results, strict=True)]

    def _advance(self, worker: Steps, result: Tensor | None) -> Collective | None:
        wait_for(self._device)
        begin = time.perf_counter()
        try:
            asked = next(worker) if result is None else worker.send(result)
        except StopIteration:
            asked = None
        wait_for(self._device)
        self._seconds += time.perf_counter() - begin
        return asked

    def _carry_out(self, asked: Sequence[Collective | None]) -> list[Tensor]:
        sums = [one.tensor for one in asked if isinstance(one, Sum)]
        rows = [one.row for one in asked if isinstance(one, Gather)]
        tables = [one.rows for one in asked if isinstance(one, Transpose)]
        assert not any(isinstance(one, SumInHops) for one in asked), "only asked for where the strategy names an algorithm"
        assert max(len(sums), len(rows), len(tables)) == self._size, "all workers ask for the same"
        for rank, tensor in enumerate(sums or rows or tables):
            self._given[rank] += tensor.nbytes
            if sums:
                self._sent[rank] += self._bytes_of_sum(tensor, rank)
            else:
                self._sent[rank] += tensor.nbytes // (1 if rows else self._size) * (self._size - 1)
        if sums:
            total = sums[0].clone()
            for tensor in sums[1:]:
                total.add_(tensor)
            return [tensor.copy_(total) for tensor in sums]
        if rows:
            return [torch.stack(rows)] * self._size
        return [torch.stack([table[rank] for table in tables]) for rank in range(self._size)]

    def _bytes_of_sum(self, tensor: Tensor, rank: int) -> int:
        return bytes_of_sum(tensor.numel(), tensor.element_size(), rank, self._size, "auto") if self._size > 1 else 0
