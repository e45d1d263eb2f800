"""An optimizer's step on its way to the servers and back, the gradients that it pushes, and where ranges lie in flat memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.layout import ParameterRange
from stretto.aggregate.parameter_server.messages import PushTaken, ValuesPulled
from stretto.engine.finite import is_finite
from stretto.errors import NonFiniteGradient, WireError
from stretto.observe.ledger import Ledger
from stretto.observe.trace import Tracer
from stretto.plain_state import is_ours


@dataclass
class Step:
    """One optimizer's step under way, or one of whose gradients the servers have not told yet what has become of them."""

    clock: int
    ranges: Sequence[ParameterRange]
    versions: Sequence[int]  # that the gradients were computed on
    pushes: Sequence[Future[PushTaken]]
    pulls: Sequence[Future[ValuesPulled]]
    begin_ns: int
    num_bytes: int  # both ways
    waiting: dict[Tensor, list[int]] = field(default_factory=dict)  # parameters without their new values: places of their ranges

    def wait_for(self, entries: Iterable[KeptParameter]) -> None:
        """All of these wait for the ranges that they lie in."""
        places: dict[str, list[int]] = {}
        for place, each in enumerate(self.ranges):
            for piece in each.slices:
                places.setdefault(piece.name, []).append(place)
        self.waiting = {each.parameter: places.get(each.name, []) for each in entries}

    def told(self) -> Iterator[tuple[ParameterRange, PushTaken]]:
        """The ranges of which it is known what has become of the push."""
        for each, push in zip(self.ranges, self.pushes, strict=True):
            if push.done() and push.exception() is None:
                yield each, push.result()

    def count_held(self, ledger: Ledger) -> None:
        """For how long the rule held this worker back, and because of whom: of the range for which it did so longest."""
        if (longest := held_longest(self.pulls)) is not None:
            ledger.count_held(longest.waited_for, 1000 * longest.kept_us)

    def trace(self, tracer: Tracer, name: str, parameters: str) -> None:
        """All of it as a transfer that ends now, without the time for which the rule held it back."""
        longest = held_longest(self.pulls)
        begin_ns = self.begin_ns + (0 if longest is None else 1000 * longest.kept_us)
        tracer.span("transfer", name, min(begin_ns, tracer.now()), num_bytes=self.num_bytes, collective=parameters)

    def when_pulled(self, callback: Callable[[], None]) -> None:
        """Call `callback` when all values have come, from whichever thread notices."""
        lock, missing = threading.Lock(), len(self.pulls)

        def one_has_come(pull: Future[Any]) -> None:
            nonlocal missing
            with lock:
                missing -= 1
                is_last = missing == 0
            if is_last:
                callback()

        for pull in self.pulls:
            pull.add_done_callback(one_has_come)


def held_longest(answers: Iterable[Future[Any]]) -> ValuesPulled | None:
    """The pull that the rule has held back longest, if it has held any."""
    found = (answer.result() for answer in answers if answer.exception() is None)
    held = [each for each in found if isinstance(each, ValuesPulled) and each.waited_for >= 0]
    return max(held, key=lambda each: each.kept_us, default=None)


def check_finite(entries: Iterable[KeptParameter], rank: int) -> None:
    """This worker's only: the gradients of others are never here."""
    for each in entries:
        if each.parameter.grad is not None and not is_finite(each.parameter.grad):
            raise NonFiniteGradient({rank: each.name})


def flat_gradient(entries: Sequence[KeptParameter]) -> Tensor:
    """Flat, from the first of these parameters on. New memory each time: what is pushed may have to be sent again."""
    if not entries:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    begin = entries[0].start
    flat = torch.empty(entries[-1].stop - begin, dtype=torch.float32, device="cpu")
    for each in entries:
        part, gradient = flat[each.start - begin : each.stop - begin], each.parameter.grad
        if gradient is None:
            part.zero_()
        else:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            part.view(each.parameter.shape).copy_(dense)
    return flat


def optimizer_of(each: ParameterRange) -> int:
    """Its number, which the name of its group begins with (`inventory.py`)."""
    return int(each.group.partition(".")[0])


def bounds_of(ranges: Sequence[ParameterRange]) -> list[tuple[int, int]]:
    """Where each lies in the flat memory."""
    bounds: list[tuple[int, int]] = []
    for each in ranges:
        start = bounds[-1][1] if bounds else 0
        bounds.append((start, start + each.numel))
    return bounds


def too_late(who: str, what: str, patience_s: float, after: str) -> WireError:
    return WireError(
        f"{who} has waited {what} for {patience_s:g} s, after {after} the servers do not answer before other workers have "
        f"pushed.\nA worker is stuck, or takes fewer steps than the others: find out with py-spy dump, give all as many "
        f"batches, or allow more time: stretto.init(timeouts=Timeouts(arrive_s=...))."
    )


def is_looked_at(optimizer: Optimizer) -> bool:
    """Whether the program has hooks that run after a step and may read weights: an average of them, say."""
    return not all(map(is_ours, optimizer._optimizer_step_post_hooks.values()))
