"""The linear scaling rule with gradual warm-up.

When the batch becomes k times as large, let the rate become k times as large too: k small steps from about the same place are
about one large one. That fails at the beginning, when weights change fast, so the rate climbs there. With base rate r, after t
steps

    rate(t) = r (1 + (k - 1) t / T)        t <= T           k = scale, T = steps
    rate(t) = k r_after(t - T)             t >= T           r_after = r without a scheduler `after`

`after` is the schedule as it would be for the small batch, and begins when the warm-up ends. All its rates, including a
lowest one, are multiplied by k; it never sees the product, so schedulers that compute a rate from the last one work too.

Momentum correction: where the rate is folded into the momentum, v <- mu v + rate g, a change of rate must multiply v by
rate_new / rate_old, or old gradients count at old rates. torch.optim.SGD, Adam and stretto.LARS keep the rate outside,
v <- mu v + g, w <- w - rate v: that *is* the correction, so nothing is left to do here. An optimizer of your own that folds
the rate in must apply the factor itself.

Cost:      nothing on a device.
Invariant: rate(0) = r, rate(T) = k r. A scheduler loaded from state_dict() goes on with the same bits.
Reference: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677, sections 2.1, 2.2 and 3.
Departs:   `after` counts from the end of the warm-up; the paper's schedule counts from the start, so subtract T from its steps.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from stretto.errors import ConfigurationError
from stretto.optim.layerwise import check_number


class LinearWarmUp(LRScheduler):
    """Lets the rate climb from the optimizer's own to `scale` times that in `steps` steps, then stay or follow `after`.

        decay = CosineAnnealingLR(optimizer, T_max=9_000)  # as for the small batch, without the warm-up
        warm_up = stretto.LinearWarmUp(optimizer, scale=stretto.world_size(), steps=1_000, after=decay)
        ...
        optimizer.step()
        warm_up.step()  # once per optimizer step; it steps `decay` itself

    `state_dict()` holds the progress, that of `after` included. `scale` and `steps` are not in it: a run that is resumed
    with another number of workers may give others, and has the rate that they mean at the step it has come to.
    """

    def __init__(self, optimizer: Optimizer, *, scale: float, steps: int, after: LRScheduler | None = None) -> None:
        _check(optimizer, scale, steps, after)
        self.scale, self.steps, self.after = float(scale), steps, after
        # What the rates are without the scaling. `initial_lr` is there if a scheduler was made, or a state loaded, before.
        rates = (
            [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups] if after is None else after.get_last_lr()
        )
        self._unscaled = [float(rate) for rate in rates]
        super().__init__(optimizer)

    @property
    def factor(self) -> float:
        """What the rate is multiplied by now."""
        if self.last_epoch >= self.steps:
            return self.scale  # exactly
        return 1 + (self.scale - 1) * (self.last_epoch / self.steps)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the groups at this step; `get_last_lr()` is for callers."""
        return [rate * self.factor for rate in self._unscaled]

    def step(self, epoch: int | None = None) -> None:
        """To be called once after each optimizer step."""
        if epoch is not None:
            raise ConfigurationError(
                f"LinearWarmUp.step({epoch}): it counts optimizer steps and cannot jump.\nCall step() once per optimizer step."
            )
        self._check_groups(len(self._unscaled), "when this scheduler was made")
        if self.after is not None and self.last_epoch >= self.steps:
            self._follow(self.after)
        super().step()

    def _follow(self, after: LRScheduler) -> None:
        # Many schedulers compute the next rate from the one in the group: show them their own, not the scaled one.
        self._set_rates(self._unscaled)
        after.step()
        self._unscaled = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _set_rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _check_groups(self, count: int, when: str) -> None:
        if count != len(self.optimizer.param_groups):
            raise ConfigurationError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups, and had {count} {when}: the new ones "
                f"have no rate to start from.\nAdd all groups first, then make the LinearWarmUp."
            )

    def state_dict(self) -> dict[str, Any]:
        """The progress: numbers and lists only, if that of `after` is."""
        return {
            "step": self.last_epoch,
            "unscaled": list(self._unscaled),
            "after": None if self.after is None else self.after.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, and set the optimizer's rates accordingly: its own state may be loaded before or after."""
        self._check_groups(len(state_dict["unscaled"]), "when this state was saved")
        if (self.after is None) != (state_dict["after"] is None):
            here, saved = ("none", "one") if self.after is None else ("one", "none")
            raise ConfigurationError(
                f"LinearWarmUp has {here} to follow after the warm-up, and {saved} when its state was saved.\n"
                f"Make it with `after` as it was."
            )
        if self.after is not None:
            self.after.load_state_dict(state_dict["after"])
        self.last_epoch, self._unscaled = state_dict["step"], list(state_dict["unscaled"])
        rates = [rate * self.factor for rate in self._unscaled]
        self._set_rates(rates)
        self._last_lr = list(rates)


def _check(optimizer: Optimizer, scale: object, steps: object, after: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"LinearWarmUp({type(optimizer).__name__}, ...): the first argument is a torch optimizer.")
    check_number("LinearWarmUp: scale", scale, positive=True)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise ConfigurationError(
            f"LinearWarmUp(steps={steps!r}): it is a number of optimizer steps, 0 or more.\n"
            f"For a number of epochs write steps=epochs * len(loader)."
        )
    if after is None:
        return
    if not isinstance(after, LRScheduler) or isinstance(after, ReduceLROnPlateau):
        raise ConfigurationError(
            f"LinearWarmUp(after={type(after).__name__}): it is stepped once per optimizer step, without a metric.\n"
            f"Give a scheduler of torch.optim.lr_scheduler whose step() takes nothing."
        )
    if after.optimizer is not optimizer:
        raise ConfigurationError("LinearWarmUp(after=...): it is a scheduler of another optimizer.\nMake both with the same one.")
