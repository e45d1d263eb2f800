"""Streaming local SGD: a fragment of the model at a time, in the background.

The model is cut into F fragments (`fragments.py`), each with outer weights theta and a velocity of its own. After every `every`/F
steps it is the next one's turn, so each is exchanged once in `every` steps, and never two at a time. With S = every / F, after
local step t = S, 2 S, 3 S, ... for fragment t / S - 1 (mod F):

    step t               Delta = theta - x_i leaves, encoded as `compress` says
    step t + overlap     Delta <- its mean over workers, after a wait if it is late;  theta <- outer(theta, Delta)
                         x_i <- merge x_i + (1 - merge) theta

What a worker has done in the `overlap` steps in between is in x_i and not in theta; `merge` says how much of it stays. 0 discards
it, which is torchft's default; the paper has 1/2.

Invariants: theta and the velocity are the same bits on all workers. With one fragment, overlap=0 and merge=0 it is the exchange
            of `training.py`, to the bit.
Cost:       bytes in `every` steps as there; the most that is sent at once is 1/F of it, and it has `overlap` steps of time.
            Memory: theta and a velocity (with momentum) as long as the model, and a fragment's Delta while it is on its way.
Buffers:    floating ones, unless they are "local", travel with the last fragment of a period and are mixed as its parameters are:
            b_i <- merge b_i + (1 - merge) mean. Counters and the like are each worker's own until `consensus` or a save.
Reference:  Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512. Departs from it:
            fragments are of about equal size, and every codec works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.compression_thread import CompressionThread, ThreadedExchange
from stretto.aggregate.all_reduce.exchange import UnderWay
from stretto.aggregate.local_sgd.delta_exchange import DeltaExchange
from stretto.aggregate.local_sgd.fragments import fragments_of
from stretto.aggregate.local_sgd.training import (
    BUFFERS_UNDER_WAY,
    LAST,
    ROUNDS,
    THETA,
    UNDER_WAY,
    VELOCITY,
    LocalAveraging,
    split,
)
from stretto.aggregate.own_weights.buffers import FlatBuffers, floating_buffers
from stretto.aggregate.own_weights.flat_weights import FlatWeights
from stretto.aggregate.own_weights.training import WHOLE
from stretto.compress.none import NoCompression
from stretto.engine.training import Setting, TensorsByName
from stretto.engine.watch import Watch
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class Fragment:
    """Parameters that are brought together at the same time, and what all workers held of them then."""

    def __init__(self, number: int, weights: FlatWeights, exchange: DeltaExchange, *, remembers: bool) -> None:
        self.number, self.weights, self.exchange = number, weights, exchange
        self.theta = weights.read()
        self.velocity = weights.zeros() if remembers else None
        self.delta: Tensor | None = None  # from the step at which it leaves to the one at which its mean is applied
        self.buffers: Tensor | None = None  # the same of buffers, with the last fragment
        self.sent: ThreadedExchange | None = None  # while it is on its way

    def forget(self) -> None:
        """What is under way is not applied."""
        self.delta = self.buffers = None


class StreamingAveraging(LocalAveraging):
    """`AllReduce` + `LocalSGD(fragments=, overlap=, merge=)` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._is_plain = False  # differences are exchanged, also with `outer=Average()`
        self._spacing = self._sync.every // self._sync.fragments
        self._fragments: list[Fragment] = []
        if self.engaged:
            self.state_text = f"sync={strategy.sync!r}, compress={strategy.compress!r}"
            self._thread = CompressionThread()
            job.threads.add(self._thread)

    def begun(self) -> None:
        self._drop()
        self._last = self.steps  # offsets count from here
        self._plain = self._make_exchange(NoCompression())
        self._fragments = []
        for number, named in enumerate(fragments_of(self._named, self._sync.fragments)):
            weights = FlatWeights(named, self.weights.device)  # with what its codec remembers
            exchange = self._make_exchange(self._strategy.compress, named)
            self._fragments.append(Fragment(number, weights, exchange, remembers=self._outer.remembers))

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def stepped(self, step: int) -> None:
        if step <= self._sync.start_after:
            super().stepped(step)
            return
        turn, since = divmod(step - self._last, self._spacing)
        if turn == 0:
            return
        fragment = self._fragments[(turn - 1) % len(self._fragments)]
        if since == 0:
            self._send(fragment, step)
        if since == self._sync.overlap:
            self._apply(fragment)

    def _send(self, fragment: Fragment, step: int) -> None:
        self._job.check_usable()
        fragment.delta = torch.sub(fragment.theta, fragment.weights.read())
        driver, number, label = self._call(fragment.exchange)
        self._setting.loop.round_ended()
        under_way = fragment.exchange.mean(fragment.delta, driver, number, label)
        if self._setting.check_finite and self._strategy.compress.lossless:
            under_way = _one_after_the_other(fragment.exchange.check(fragment.delta, driver, number, label), under_way)
        if fragment is self._fragments[-1] and (buffers := self._buffers()) is not None:
            fragment.buffers = buffers.read().to(fragment.delta.device)
            under_way = _one_after_the_other(under_way, self._plain.mean(fragment.buffers, *self._call(self._plain)))
        self._job.whereabouts.carrying(self._channel, 1)
        fragment.sent = self._thread.submit(self._carried(under_way, self._trace_of(fragment, step)), fragment.delta.device)

    def _trace_of(self, fragment: Fragment, step: int) -> Callable[[], None] | None:
        """What to call when its mean has come, where the job is traced."""
        if (tracer := self._job.tracer) is None:
            return None
        name, num_bytes = f"fragment {fragment.number} after step {step}", 4 * fragment.weights.numel
        return partial(tracer.span, "transfer", name, tracer.now(), num_bytes=num_bytes)

    def _carried(self, under_way: UnderWay, arrived: Callable[[], None] | None) -> UnderWay:
        try:
            yield from under_way
            if arrived is not None:
                arrived()
        finally:
            self._job.whereabouts.carrying(self._channel, -1)

    def _arrive(self, fragment: Fragment) -> None:
        """Wait until the fragment's mean has come, if it is on its way."""
        if fragment.sent is None:
            return
        begin_ns, is_late = time.perf_counter_ns(), not fragment.sent.done
        sent, fragment.sent = fragment.sent, None
        try:
            with self._job.whereabouts.waiting(self._channel):
                sent.wait()
        except BaseException:
            fragment.exchange.end(good=False)
            fragment.forget()  # it is still this worker's own, and must not be applied as if it were the mean
            raise
        self._job.ledger.count_wait(time.perf_counter_ns() - begin_ns)
        if is_late and self._job.tracer is not None:
            self._job.tracer.span("wait", f"for the mean of fragment {fragment.number}", begin_ns)
        fragment.exchange.end(good=True)

    def _apply(self, fragment: Fragment) -> None:
        self._arrive(fragment)
        delta, fragment.delta = fragment.delta, None
        if delta is None:
            return  # loaded from a state that has none under way
        velocity = delta if fragment.velocity is None else fragment.velocity
        for part, rate in self._rates(fragment.weights):
            self._outer.move(fragment.theta[part], delta[part], velocity[part], rate)
        merge = self._sync.merge
        fragment.weights.write(fragment.theta if merge == 0 else fragment.weights.read().lerp_(fragment.theta, 1 - merge))
        self._job.ledger.count_round(staleness=self._sync.overlap)
        mean, fragment.buffers = fragment.buffers, None
        if mean is not None and (buffers := self._buffers()) is not None and buffers.numel == mean.numel():
            own = buffers.read()
            mean = mean.to(own)
            finite = own.isfinite() & mean.isfinite()  # a mask of -inf stays one
            buffers.write(torch.where(finite, own.lerp(mean, 1 - merge), mean))
        self.is_together = len(self._fragments) == 1 and merge == 0

    def _buffers(self) -> FlatBuffers | None:
        """Those that are averaged."""
        if self._job.world_size == 1 or not self._setting.broadcast_buffers:
            return None
        return floating_buffers(Watch(self._setting.model))

    def settle(self) -> None:
        """Wait for the mean that is on its way. It is applied when its step comes."""
        for fragment in self._fragments:
            self._arrive(fragment)

    def _drop(self) -> None:
        """Give up what is under way: it belongs to weights that have been replaced. Waits until its memory is free."""
        for fragment in self._fragments:
            with suppress(Exception):
                self._arrive(fragment)
            fragment.forget()

    def close(self) -> None:
        if self.engaged:
            self._thread.stop()
        super().close()

    # -- what is remembered -------------------------------------------------------------------------------------------

    def exchanges(self) -> Sequence[DeltaExchange]:
        return [fragment.exchange for fragment in self._fragments]

    def shared_extra(self) -> dict[str, Tensor]:
        self.settle()
        rounds = torch.tensor([[fragment.exchange.rounds] for fragment in self._fragments], device="cpu")
        extra = {LAST: torch.tensor(self._last, device="cpu"), ROUNDS: rounds}
        extra[THETA] = self._as_whole({fragment.number: fragment.theta for fragment in self._fragments})
        if self._outer.remembers:
            extra[VELOCITY] = self._as_whole({f.number: f.velocity for f in self._fragments if f.velocity is not None})
        if any(fragment.delta is not None for fragment in self._fragments):
            extra[UNDER_WAY] = self._as_whole({f.number: f.delta for f in self._fragments if f.delta is not None})
        if (buffers := self._fragments[-1].buffers) is not None:
            extra[BUFFERS_UNDER_WAY] = buffers.reshape(1, -1)  # unlike any vector as long as the weights
        return extra

    def load_shared_extra(self, saved: Mapping[str, Tensor]) -> None:
        self._drop()
        if LAST in saved:
            self._last = int(saved[LAST])
        turn, since = divmod(self.steps - self._last, self._spacing)
        under_way = (turn - 1) % len(self._fragments) if turn and since < self._sync.overlap else None
        for fragment in self._fragments:
            if THETA in saved:
                fragment.theta = self._part_of(saved[THETA], fragment)
            if fragment.velocity is not None and VELOCITY in saved:
                fragment.velocity = self._part_of(saved[VELOCITY], fragment)
            if UNDER_WAY in saved and fragment.number == under_way:
                fragment.delta = self._part_of(saved[UNDER_WAY], fragment)
                if fragment is self._fragments[-1] and BUFFERS_UNDER_WAY in saved:
                    fragment.buffers = saved[BUFFERS_UNDER_WAY].reshape(-1)

    def load_remembered(self, own: TensorsByName, shared: TensorsByName) -> None:
        ours, theirs = split(shared)
        super(LocalAveraging, self).load_remembered({}, ours)
        rounds = ours.get(WHOLE, {}).get(ROUNDS)
        for fragment in self._fragments:
            names = {part.name for part in fragment.weights.parts}
            named = [(name, parameter) for name, parameter in self._named if name in names]
            fragment.exchange = self._make_exchange(self._strategy.compress, named)
            mine = ({name: values for name, values in every.items() if name in names} for every in (own, theirs))
            fragment.exchange.restore(0 if rounds is None else int(rounds[fragment.number, 0]), *mine)

    def _as_whole(self, values: Mapping[int, Tensor]) -> Tensor:
        """Vectors of fragments, by number, as one of the whole model: zeros for the others."""
        whole, places = self.weights.zeros(), {part.name: part for part in self.weights.parts}
        for number, value in values.items():
            for part in self._fragments[number].weights.parts:
                place = places[part.name]
                whole[place.start : place.stop] = value[part.start : part.stop]
        return whole

    def _part_of(self, whole: Tensor, fragment: Fragment) -> Tensor:
        places = {part.name: part for part in self.weights.parts}
        parts = [whole[places[part.name].start : places[part.name].stop] for part in fragment.weights.parts]
        return torch.cat(parts).to(fragment.weights.device)


def _one_after_the_other(first: UnderWay, second: UnderWay) -> UnderWay:
    yield from first
    yield from second
