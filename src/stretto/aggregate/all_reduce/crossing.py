"""Across the iteration barrier: gradients travel under the next forward, and a parameter is updated just before it is read.

    backward ends     every bucket has left. The closing bucket, which is short and the most urgent, says that no worker's
                      backward failed: from here on nothing can call the round off but a lost peer
    p.grad            a stand-in without values (`engine/gradient_under_way.py`), None for a parameter that nobody has used
    optimizer.step    is noted with its options (`engine/postponed_step.py`); no parameter moves
    next forward      before a module reads its parameters, their buckets are waited for and these parameters updated. Before one
                      that is still on its way is waited for, others that have arrived are updated
    next backward     everything has been updated: buckets are free to be filled again

Result: the same bits as with the barrier. Every update has the same gradient, options and state as it would have had in `step`;
only its time differs, and no forward can tell, because it waits. What reads weights without calling a module (`p.data`, a copy
of the weights made by hand) has to call `stretto.synchronize(model)` first.

If an exchange fails half of the parameters may have been updated. The error is raised wherever the program is, and again at every
later use, until a saved state has been loaded.

References: Jayarajan et al., "Priority-based parameter propagation", MLSys 2019; Peng et al., "A generic communication scheduler
for distributed DNN training acceleration" (ByteScheduler), SOSP 2019, section 5, for the barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.engine.bucket import gradient_dtype
from stretto.engine.gradient_under_way import GradientUnderWay
from stretto.engine.postponed_step import PostponedStep
from stretto.errors import StrettoError
from stretto.observe.trace import Tracer


class Crossing:
    """The round whose buckets are on their way, and the steps that wait for them.

    `wait_for(bucket)` returns when it has arrived; `finish(bucket, used)` makes of what has come the gradients of its parameters,
    and `drop(bucket)` nothing.
    An interrupt in the former leaves everything as it was, so that it can be waited for again."""

    def __init__(
        self,
        wait_for: Callable[[ReducedBucket], None],
        finish: Callable[[ReducedBucket, Sequence[bool]], None],
        drop: Callable[[ReducedBucket], None],
        tracer: Tracer | None = None,
    ) -> None:
        self._wait_for = wait_for
        self._finish = finish
        self._drop = drop
        self._tracer = tracer
        self._under_way: dict[ReducedBucket, list[bool]] = {}  # bucket -> which of its parameters anybody has used
        self._bucket_of: dict[Tensor, ReducedBucket] = {}  # of those that are on their way
        self._steps: list[PostponedStep] = []
        self._noted: PostponedStep | None = None  # of an optimizer that is about to step
        self._in_passing: set[Tensor] = set()  # updated before any module that reads them was called
        self._stand_ins: dict[Tensor, GradientUnderWay] = {}
        self._failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is on its way."""
        return not self._under_way

    def begin(self, buckets: Sequence[ReducedBucket], used: Sequence[list[bool]]) -> None:
        """These buckets have left, and the round is closed."""
        self._under_way = dict(zip(buckets, used, strict=True))
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        if self._stand_ins.keys() - self._bucket_of.keys():
            self._stand_ins.clear()  # parameters were removed
        for bucket, flags in self._under_way.items():
            for parameter, somewhere in zip(bucket.parameters, flags, strict=True):
                parameter.grad = self._stand_in(parameter) if somewhere else None

    def _stand_in(self, parameter: Tensor) -> GradientUnderWay:
        made = self._stand_ins.get(parameter)
        if made is None or made.shape != parameter.shape or made.dtype != gradient_dtype(parameter):
            made = self._stand_ins[parameter] = GradientUnderWay(parameter, gradient_dtype(parameter))
        made.is_zeroed = False
        return made

    @property
    def stale(self) -> frozenset[Tensor]:
        """The parameters that have yet to be updated, or were updated while no forward of a module that reads them has come."""
        return frozenset(parameter for step in self._steps for parameter in step.waiting) | self._in_passing

    def is_stale(self, parameter: Tensor) -> bool:
        return parameter in self._in_passing or any(parameter in step.waiting for step in self._steps)

    def note_step(self, optimizer: Optimizer) -> set[Tensor] | None:
        """The optimizer is about to step: which of its parameters do so now. Those whose gradient is on its way will when it is
        here, if the step takes place (`step_taken`)."""
        self._noted = None
        if self.is_over:
            return None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if isinstance(parameter.grad, GradientUnderWay) and parameter.grad.is_zeroed:
                parameter.grad = torch.zeros_like(parameter.grad)
        later = {parameter for parameter in parameters if isinstance(parameter.grad, GradientUnderWay)}
        if later:
            self._noted = PostponedStep(optimizer, later)
        return set(parameters) - later

    def step_taken(self) -> None:
        """The optimizer has stepped."""
        if self._noted is not None:
            self._steps.append(self._noted)
            self._noted = None

    # -- arriving -----------------------------------------------------------------------------------------------------

    def settle(self, parameters: Iterable[Tensor]) -> None:
        """Return when these parameters, which are about to be read, are up to date."""
        self.check()
        if not self._under_way and not self._in_passing:
            return
        for parameter in parameters:
            bucket = self._bucket_of.get(parameter)
            if bucket is not None:
                self._use_the_wait_for(bucket)
                self._update(bucket)
            self._in_passing.discard(parameter)

    def settle_all(self) -> None:
        """Return when nothing is on its way."""
        self.check()
        for bucket in list(self._under_way):
            self._update(bucket)
        self._in_passing.clear()

    def _use_the_wait_for(self, bucket: ReducedBucket) -> None:
        """Before waiting for a bucket that is still on its way: update what has arrived meanwhile."""
        for other in list(self._under_way):
            if bucket.exchange is None or bucket.exchange.arrived:
                return
            if other is not bucket and other.exchange is not None and other.exchange.arrived:
                self._update(other)

    def _update(self, bucket: ReducedBucket) -> None:
        """Wait for a bucket, and take the steps that its parameters wait for; those that wait for none get their gradient."""
        used = self._under_way[bucket]
        try:
            self._wait_for(bucket)
        except Exception as error:
            self._failure = error
            raise
        try:
            self._finish(bucket, used)
            self._take_steps(bucket, used)
        except BaseException as error:  # also an interrupt: half of it may have been done
            self._failure = error
            raise
        finally:
            del self._under_way[bucket]
            for parameter in bucket.parameters:
                self._bucket_of.pop(parameter, None)
        if not self._under_way:
            self._steps.clear()

    def _take_steps(self, bucket: ReducedBucket, used: Sequence[bool]) -> None:
        members = zip(bucket.parameters, bucket.views, used, strict=True)
        ready = {parameter: view for parameter, view, somewhere in members if somewhere}
        self._in_passing.update(parameter for parameter in ready if self.is_stale(parameter))
        begin_ns = 0 if self._tracer is None else self._tracer.now()
        for step in self._steps:
            step.check(ready)
        for step in self._steps:
            step.take(ready)
        if self._tracer is not None:
            self._tracer.span("update", f"update of transfer {bucket.number}", begin_ns)
        for parameter, view in ready.items():
            if isinstance(stand_in := parameter.grad, GradientUnderWay):
                parameter.grad = view.zero_() if stand_in.is_zeroed else view

    # -- failures -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if an earlier exchange has failed: then some parameters have been updated and others not."""
        if self._failure is not None:
            raise StrettoError(
                "a step was taken for some parameters and not for others, because gradients that were on their way under the "
                f"forward did not arrive: {self._failure}\nLoad a saved state, stretto.load(...), before going on."
            ) from self._failure

    def forget(self) -> None:
        """What was to be done with what is on its way is not done. It is waited for all the same: its memory is not free yet."""
        for bucket in self._under_way:
            with suppress(Exception):
                self._wait_for(bucket)
            self._drop(bucket)
            for parameter in bucket.parameters:
                if isinstance(parameter.grad, GradientUnderWay):
                    parameter.grad = None
        self._under_way, self._bucket_of, self._failure, self._noted = {}, {}, None, None
        self._steps.clear()
        self._in_passing.clear()

    def settle_or_forget(self) -> None:
        """Before everything is replaced: after a failure there is nothing to be settled."""
        if self._failure is None:
            self.settle_all()
        else:
            self.forget()
