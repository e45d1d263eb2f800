"""What happens around `optimizer.step()`.

Every optimizer that steps parameters of a distributed model passes here: those given to `distribute` by hooks of their own,
others (made later, or inside another optimizer) by torch's hooks for all optimizers. Before a step the engine closes what is
open, refuses gradients that are not combined, and puts aside those that are not to step; after it the step is noted
(`loop_state.py`).

The hooks for all optimizers are set once for the process and stay: they keep no state, and find the engine of a parameter by the
hook that it has on the parameter. (Taking them off again would change torch's table while another thread steps.)

A step that is given a closure makes its gradients itself, by calling it, so everything waits until the closure has run.
LBFGS decides by the value of the loss, and would decide differently on workers whose losses differ: it gets the mean over all
workers. Other optimizers only hand the loss back, as it is. (One of the user's own that decides by the loss takes a mean from its
closure: `return stretto.all_reduce(loss.item())`.)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from stretto.collectives.plan import Kind
from stretto.engine import misuse
from stretto.engine.admission import check_optimizer
from stretto.engine.gradient_under_way import StandIn
from stretto.engine.postponed_step import is_taking_step
from stretto.engine.weak_hook import owners
from stretto.job import Job
from stretto.plain_state import is_ours

if TYPE_CHECKING:
    from stretto.engine.engine import Engine

log = logging.getLogger("stretto")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Given:
    """The hooks on one optimizer that was given to `distribute`, which holds the engine by them."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine = engine
        self._checked = num_parameters(optimizer)

    @classmethod
    def hook(cls, engine: Engine, optimizer: Optimizer) -> list[RemovableHandle]:
        given = cls(engine, optimizer)
        handles = [optimizer.register_step_pre_hook(given.before)]
        if engine.engaged:  # otherwise there are no rounds, and nothing would ever read what is noted
            handles.append(optimizer.register_step_post_hook(given.after))
            # Before hooks of the user's own, which may read what the step has done.
            optimizer._optimizer_step_post_hooks.move_to_end(handles[-1].id, last=False)  # type: ignore[attr-defined]
        return handles

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if is_within_step(optimizer):
            return None
        if self._checked != num_parameters(optimizer):
            check_optimizer(self._engine.model, optimizer)
            self._checked = num_parameters(optimizer)
        return prepare([self._engine], optimizer, args, kwargs)

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_within_step(optimizer):
            self._engine.after_step(optimizer)


class PutAside:
    """Gradients that a step is not to see. A parameter without one is left as it is by every optimizer of torch's."""

    def __init__(self) -> None:
        self._gradients: dict[Tensor, Tensor] = {}

    def put(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._gradients[parameter], parameter.grad = parameter.grad, None

    def give_back(self) -> None:
        """What has got another gradient since keeps that one."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
        self._gradients.clear()


def is_within_step(optimizer: Optimizer) -> bool:
    """Asked by a hook: whether its `step` was called by another `step` of the same optimizer (a subclass that calls `super()`,
    which torch gives hooks of its own), or is one that was postponed. Only the outermost counts."""
    if is_taking_step(optimizer):
        return True
    step = type(optimizer).step
    code = step.__code__ if getattr(step, "hooked", False) else None
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None and found < 2:
        found += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found > 1


def can_be_postponed(optimizer: Optimizer, engine: Engine) -> bool:
    """Whether nobody else looks at gradients or weights around this step. Other optimizers than the given ones have not been
    tried out (`per_parameter.py`), and the user's own hooks may clip gradients before the step or average weights after it."""
    if not any(optimizer is given for given in engine.loop.optimizers):
        return False
    before, after = optimizer._optimizer_step_pre_hooks.values(), optimizer._optimizer_step_post_hooks.values()
    return all(map(is_ours, (*before, *after)))


def look_before_step(engine: Engine, optimizer: Optimizer) -> None:
    """Refuse gradients that are this worker's own, and warn, once, of those that the program has put into p.grad itself: there
    was no round since this optimizer's last step."""
    loop = engine.loop
    if loop.backwards and engine.buckets:
        if has_nonzero(parameter.grad for parameter in stepped_by(optimizer, engine)):
            raise misuse.step_without_round(optimizer, engine.name, len(loop.backwards))
    elif loop.is_second_step(optimizer) and engine.buckets and not (loop.warned or loop.joining or engine.job.world_size == 1):
        places = engine.places
        own = (p.grad for p in stepped_by(optimizer, engine) if p in places.of and not places.holds_result(p))
        if has_nonzero(own):
            loop.warned = True
            log.warning("rank %d: %s", engine.job.rank, misuse.own_gradients(optimizer, engine.name))


def stepped_by(optimizer: Optimizer, engine: Engine) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"] if engine.combines(parameter))


def has_nonzero(gradients: Iterable[Tensor | None]) -> bool:
    """Whether a step would use any of these. Zeros are as good as none: the same on all workers."""
    return any(gradient is not None and bool((_dense_values(gradient) != 0).any()) for gradient in map(_own_part, gradients))


def _own_part(gradient: Tensor | None) -> Tensor | None:
    """What a stand-in stands for has been combined; backward may have added to it since."""
    return gradient.added if isinstance(gradient, StandIn) else gradient


def _dense_values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def watch_all_optimizers() -> None:
    """Set the hooks for optimizers that nobody has given to `distribute`, if they are not set."""
    if before_any not in torch_optimizer._global_optimizer_pre_hooks.values():
        torch_optimizer.register_optimizer_step_pre_hook(before_any)
        torch_optimizer.register_optimizer_step_post_hook(after_any)


def before_any(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if is_taking_step(optimizer):
        return None
    engines = engines_of_another(optimizer)
    for engine in engines:
        if engine.joining:
            raise misuse.unknown_optimizer_in_join(optimizer, engine.name)
        engine.loop.others.add(optimizer)
    return prepare(engines, optimizer, args, kwargs) if engines else None


def after_any(optimizer: Optimizer, *_: Any) -> None:
    if is_taking_step(optimizer):
        return
    for engine in engines_of_another(optimizer):
        engine.after_step(optimizer)


def engines_of_another(optimizer: Optimizer) -> list[Engine]:
    """The engines of the parameters of an optimizer that has no hooks of its own."""
    if any(isinstance(getattr(hook, "__self__", None), Given) for hook in optimizer._optimizer_step_pre_hooks.values()):
        return []
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return list(dict.fromkeys(engine for parameter in parameters for engine in owners(parameter)))


def num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


# -- closures ---------------------------------------------------------------------------------------------------------


def prepare(engines: Sequence[Engine], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Let the engines look at the gradients before they are used: now, or each time after the closure that makes them.

    Gives the arguments of `step` with another closure, or None if they may stay as they are."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _followed(kwargs["closure"], engines, optimizer)}
    if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer itself
        return (args[0], _followed(args[1], engines, optimizer), *args[2:]), kwargs
    for engine in engines:
        engine.before_step(optimizer)
    return None


def _followed(closure: Callable[[], Any], engines: Sequence[Engine], optimizer: Optimizer) -> Callable[[], Any]:
    def closure_and_check() -> Any:
        loss = closure()
        for engine in engines:
            engine.before_step(optimizer)
        return mean_loss(loss, engines[0].job, optimizer) if decides_by_loss(optimizer) else loss

    return closure_and_check


def decides_by_loss(optimizer: Optimizer) -> bool:
    """Whether what the closure returns decides what the step does: so does LBFGS, whoever wrote it."""
    return isinstance(optimizer, LBFGS) or "lbfgs" in type(optimizer).__name__.lower()


def mean_loss(loss: Any, job: Job, optimizer: Optimizer) -> Any:
    """The mean over all workers of what their closures gave, weighted like their gradients."""
    is_number = isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1)
    if not is_number or job.world_size == 1:
        return loss
    value = float(loss.detach() if isinstance(loss, Tensor) else loss)
    weighted = torch.tensor([value * job.weight, job.weight], dtype=torch.float64, device="cpu")
    job.run(Kind.ALL_REDUCE, weighted, "ring", label=f" of the loss that {type(optimizer).__name__} decides by")
    total, weight = weighted.tolist()
    mean = total / weight if weight else float("nan")
    return torch.full_like(loss.detach(), mean) if isinstance(loss, Tensor) else mean
