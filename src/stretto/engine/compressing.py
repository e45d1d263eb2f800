"""Gradients that are compressed: from a full bucket to the mean over workers, in the compression thread.

What may not happen to a round that comes to nothing: that residuals, momenta or Q matrices have moved on while no worker steps.
So every turn proposes its new state, and `settle` commits it when all workers' notes say that the round is good. A gradient that
is not finite cannot be encoded: its worker sends zeros in its place and says so in its notes; then everybody's gradients become
NaN, as they would without compression (`GradScaler` skips the step), and nothing is committed.

With a `GradScaler`, values are divided by its scale before they are encoded and multiplied by it afterwards: the scale changes
from step to step, and residuals must not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.compress.buffer_pool import BufferPool
from stretto.compress.none import NoCompression
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext
from stretto.compress.state import CompressionState
from stretto.engine.bucket import Bucket, Notes
from stretto.engine.carrier import MOST, Carrier
from stretto.engine.lane import Course, Lane
from stretto.job import Job
from stretto.strategy import Strategy

INFINITE = Notes._fields.index("infinite")


class Compressing:
    """The exchanges of one engine."""

    numbers_per_bucket = MOST

    def __init__(self, job: Job, channel: int, strategy: Strategy, scaler: Any) -> None:
        self._job = job
        self._channel = channel
        self._algorithm = strategy.aggregate.algorithm
        self._scaler = scaler
        self._lane = Lane()
        self._carrier = Carrier(job, channel, self._algorithm)
        self._infinite = False
        job.threads.add(self._lane)

    def start(self, bucket: Bucket, *, sequence: int, label: str, absent: bool, weight: float) -> None:
        """Send the bucket on its way. `absent`: this worker has no data, so nothing of its own to say."""
        if bucket.state is not None:
            state = bucket.state.of_absent() if absent else bucket.state
            draw = RandomKeys.of_round(state.rounds, self._job.rank)
            world_size = self._job.world_size
            bucket.turn = ExchangeContext(
                bucket.layout, state, draw, self._job.rank, world_size, self._algorithm, bucket.kept, weight
            )
        self._submit(bucket, self._course(bucket, sequence, label))

    def start_closing(self, bucket: Bucket, *, sequence: int, label: str) -> None:
        """The notes, when the thread has seen all buckets' values and knows whether they are finite."""
        self._submit(bucket, self._closing_course(bucket, sequence, label))

    def _submit(self, bucket: Bucket, course: Course) -> None:
        if not self._job.is_here:  # the thread that would carry it is the parent's
            self._job.check_usable()
        self._job.whereabouts.carrying(self._channel, 1)
        bucket.errand = self._lane.submit(self._carried(course), bucket.flat.device)

    def _carried(self, course: Course) -> Course:
        try:
            yield from course
        finally:
            self._job.whereabouts.carrying(self._channel, -1)

    def look_at(self, sparse: Iterable[Tensor]) -> None:
        """Gradients that are not compressed, but that decide as well whether this round is good. Before `start_closing`."""
        self._infinite |= not all(
            _is_finite(gradient.coalesce().values() if gradient.is_sparse else gradient) for gradient in sparse
        )

    def _course(self, bucket: Bucket, sequence: int, label: str) -> Course:
        gradients = bucket.gradients
        values = gradients if bucket.turn is None else _in_float32(bucket)
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if not _is_finite(values):
            self._infinite = True
            values.zero_()
        if scale != 1.0:
            values.mul_(1.0 / scale)
        yield from self._carrier.carry(bucket.compression.exchange(values, _turn(bucket, self._job)), sequence, label)
        if scale != 1.0:
            values.mul_(scale)
        if values is not gradients:
            gradients.copy_(values)

    def _closing_course(self, bucket: Bucket, sequence: int, label: str) -> Course:
        if self._infinite:
            bucket.notes[INFINITE] = 1.0
        yield from self._carrier.carry(NoCompression().exchange(bucket.flat, _turn(bucket, self._job)), sequence, label)

    def receive(self, buckets: Sequence[Bucket]) -> None:
        """Wait for every bucket, also when one fails: the memory of the others is not free before. Then raise the first error."""
        begin_ns, first = time.perf_counter_ns(), None
        with self._job.whereabouts.waiting(self._channel):
            for bucket in buckets:
                try:
                    if bucket.errand is not None:
                        bucket.errand.wait()
                except Exception as error:  # also a raw one, of a user's codec
                    first = first or error
        self._job.ledger.count_wait(time.perf_counter_ns() - begin_ns)
        if first is not None:
            raise first

    def settle(self, buckets: Sequence[Bucket], *, good: bool) -> None:
        """The round has ended: what it proposed becomes the state, or is forgotten."""
        self._infinite = False
        for bucket in buckets:
            if bucket.turn is not None and bucket.state is not None:
                if good:
                    bucket.turn.state.commit()
                    bucket.state.rounds = bucket.turn.state.rounds
                else:
                    bucket.turn.state.discard()

    def stop(self) -> None:
        self._lane.stop()


def _turn(bucket: Bucket, job: Job) -> ExchangeContext:
    if bucket.turn is not None:
        return bucket.turn
    return ExchangeContext(
        bucket.layout, CompressionState(bucket.layout, bucket.flat.device), rank=job.rank, world_size=job.world_size
    )


def _in_float32(bucket: Bucket) -> Tensor:
    """The gradients themselves, or a copy in memory that is kept with the bucket."""
    gradients = bucket.gradients
    if gradients.dtype is torch.float32:
        return gradients
    memory: BufferPool = bucket.kept.setdefault(BufferPool, BufferPool())
    return memory.empty(len(gradients), torch.float32, gradients.device).copy_(gradients)


def _is_finite(values: Tensor) -> bool:
    """In one pass: the largest magnitude is infinite or not a number if any value is."""
    if values.numel() == 0:
        return True
    if not (values.is_floating_point() or values.is_complex()):
        return True
    return math.isfinite(float(torch.linalg.vector_norm(values, math.inf)))
