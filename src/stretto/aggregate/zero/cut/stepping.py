"""A step of a model whose parameters are in slices: each worker steps its own, and that is all.

The next forward gathers what has been stepped; nothing is sent here, and nothing can be under way.
"""

from __future__ import annotations

import torch

from stretto.aggregate.zero.slice_optimizer import SliceOptimizer
from stretto.aggregate.zero.slices import Piece
from stretto.aggregate.zero.stepping import SlicedSteps


class CutOptimizer(SliceOptimizer):
    """Its pieces are views of this worker's slices of the parameters, which always lie where they lie."""

    def _look_at(self, piece: Piece) -> None:
        pass


class CutSteps(SlicedSteps):
    """See the module's text."""

    def _run_next(self) -> None:
        step, bucket = self._queue.popleft()
        slots = step.slots[bucket]
        begin_ns = 0 if self._tracer is None else self._tracer.now()
        try:
            step.optimizer.step(bucket, slots, step.options)
        except BaseException as error:  # also an interrupt: half of it may have been done
            self._failure = error
            raise
        torch.autograd.graph.increment_version([bucket.parameters[slot] for slot in slots])
        if self._tracer is not None:
            self._tracer.span("update", f"update of slice {bucket.number}", begin_ns)
