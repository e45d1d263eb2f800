"""What the training loops of all workers must agree on, beside the gradients themselves.

Workers stay equal only if they all use the combined gradients in the same way. What can be seen of that is written into a short
text that rides in the label of each round's last collective. Where the texts differ, all workers raise `RankMismatch`, which
shows them, before anybody takes another step:

    learning rates    of the optimizers that were given to distribute(), as they are now
    steps             which optimizers have stepped since the last round: a worker that caught an exception and took no step, or
                      one more, has other parameters now
    rounds            how many rounds have given this worker gradients: one that lost a round to an exception, when the others
                      did not, has missed a step too
    scale             of the loop's GradScaler, and its count towards the next growth: with different scales the mean is a mean
                      of differently scaled gradients

How many backward passes were accumulated under `no_sync` is left out on purpose: workers may cut their samples into different
numbers of pieces, and say with `weight` what each contribution counts.

Nothing is compared under `join`: there workers that have run out do not step, and all become equal at its end.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.engine import misuse
from stretto.job import Job

MOST_FRAMES = 8  # from GradScaler.step to the hook that looks for it there are 3 to 5
MOST_STEPS = 64  # entries of the list of steps since the last round
_MAYBE_STEP = getattr(torch.amp.GradScaler, "_maybe_opt_step", torch.amp.GradScaler.step)  # private, so it may go one day
_SCALER_STEPS = (torch.amp.GradScaler.step.__code__, _MAYBE_STEP.__code__)


class LoopState:
    """One engine's record of its training loop."""

    def __init__(self, optimizers: tuple[Optimizer, ...], scaler: torch.amp.GradScaler | None) -> None:
        self.optimizers = optimizers  # those given to distribute()
        self.scaler = scaler
        self.joining = False  # workers may run out of data at different times
        self.rounds = 0  # that have given this worker gradients, since all workers were made equal
        self.backwards: set[int] = set()  # under no_sync since the last round, by autograd's number
        self.others: WeakSet[Optimizer] = WeakSet()  # that step the model's parameters and were not given to distribute()
        self.warned = False  # of gradients that came from no backward
        self._steps: list[list[Any]] = []  # [name of the optimizer, how often in a row] since the last round
        self._scale: tuple[float, int] | None = None  # as read when the optimizer stepped last
        self._last_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # after how many rounds each has stepped last

    def text(self) -> str:
        """What must be the same on all workers when a round ends."""
        if self.joining:
            return ""
        steps = ", ".join(name if times == 1 else f"{times} times {name}" for name, times in self._steps)
        parts = [
            f"learning rates {self.learning_rates()}",
            f"{self.rounds} rounds before it",
            f"since then a step of {steps}" if steps else "no step since then",
        ]
        if (scale := self.scale()) is not None:
            parts.append(f"a loss scale of {scale[0]:g} for {scale[1]} steps")
        return f" with {', '.join(parts)}"

    def learning_rates(self) -> list[float | None]:
        """Those in the groups of the given optimizers. Not those on an accelerator: reading one would wait for it."""
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups if "lr" in group]
        return [None if rate is None or _is_elsewhere(rate) else float(rate) for rate in rates]

    # -- what happens -------------------------------------------------------------------------------------------------

    def stepped(self, optimizer: Optimizer) -> None:
        name = self._name(optimizer)
        if self._steps and self._steps[-1][0] == name:
            self._steps[-1][1] += 1
        else:
            if len(self._steps) >= MOST_STEPS:  # without rounds nothing else ends the list
                totals: dict[str, int] = {}
                for each, times in self._steps:
                    totals[each] = totals.get(each, 0) + times
                self._steps = [[each, times] for each, times in totals.items()]
            self._steps.append([name, 1])

    def is_second_step(self, optimizer: Optimizer) -> bool:
        """Before a step: whether no round has come since this optimizer's last one, or since the beginning."""
        before = self._last_steps.get(optimizer, 0)
        self._last_steps[optimizer] = self.rounds
        return before == self.rounds

    def _name(self, optimizer: Optimizer) -> str:
        """Tells optimizers of one class apart, in words that are the same on all workers."""
        name = type(optimizer).__name__
        for number, given in enumerate(self.optimizers):
            if given is optimizer:
                return name if len(self.optimizers) == 1 else f"{name} (optimizer {number})"
        return f"{name} (of {sum(len(group['params']) for group in optimizer.param_groups)} parameters)"

    def round_ended(self) -> None:
        self._steps.clear()
        self.backwards.clear()

    def begin_anew(self) -> None:
        """All workers have been made equal: what they did before no longer matters. Gradients that were accumulated under no_sync
        are still there, and still this worker's own."""
        self.rounds = 0
        self._steps.clear()
        self._last_steps.clear()
        self._scale = None  # of before

    def anybody_has_accumulated(self, job: Job, on_mean: bool, no_second_mean: str | None) -> bool:
        """Whether any worker has gradients from backward passes under no_sync. `on_mean`: this one's lie on top of a mean that no
        step has used, which all workers refuse."""
        everybody = [[bool(self.backwards), on_mean]]
        if job.world_size > 1 and not self.joining:  # under join the others may have run out, and do not come here
            everybody = job.gather_object(everybody[0])
        for rank, (_, theirs) in enumerate(everybody):
            if theirs:
                raise misuse.synchronize_over_mean(str(no_second_mean), rank)
        return any(theirs for theirs, _ in everybody)

    # -- the scaler ---------------------------------------------------------------------------------------------------

    def look_for_scaler(self) -> None:
        """In the hook before a step: remember the GradScaler whose `step` leads here, and its scale.

        An optimizer does not know its scaler, so this looks at who calls. On an accelerator this is also the one moment at which
        reading the scale does not wait, because the scaler itself has just waited for its verdict.
        """
        frame: FrameType | None = sys._getframe(1)
        for _ in range(MOST_FRAMES):
            if frame is None:
                return
            if frame.f_code in _SCALER_STEPS:
                self.scaler = frame.f_locals["self"]
                self._scale = _scale_of(self.scaler)
                return
            frame = frame.f_back

    def scale(self) -> tuple[float, int] | None:
        """The scale and for how many steps it has been good; on an accelerator, as they were at the last step."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return None
        on_cpu = isinstance(scaler._scale, Tensor) and scaler._scale.device.type == "cpu"
        return _scale_of(scaler) if on_cpu else self._scale


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _scale_of(scaler: Any) -> tuple[float, int] | None:
    if not scaler.is_enabled():
        return None
    if not isinstance(scaler._scale, Tensor) or not isinstance(scaler._growth_tracker, Tensor):
        return None  # it has not been used yet
    return float(scaler._scale), int(scaler._growth_tracker)
