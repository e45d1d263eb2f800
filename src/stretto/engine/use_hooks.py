"""Telling a Training before parameters are read, so that a forward waits for those of its module and no others.

A parameter is normally read by the forward of the module that it belongs to. Not always: `nn.MultiheadAttention` reads the weight
of its `out_proj` and never calls it, tied weights are read by several modules, and a compiled model calls no module at all. So
first it is watched, in a round or a few, which modules' forwards run (`Readers`). A parameter that got a gradient although
none of its own modules ran is read by another one: it is waited for before the nearest module around its own whose forward does
run, and if there is none, before any forward of the model.

What was seen is training. Without gradients torch may take another way (`nn.TransformerEncoderLayer` then reads the weights of
its layers instead of calling them), so there every module waits for all parameters of the model.

What comes later and was not seen then (a branch that is first taken after an hour, and reads another module's weight) is noticed
when the gradient comes and none of the parameter's readers has run since its update: the engine refuses that backward. What stays
unnoticed is a parameter that is read by hand *and*, later in the same forward, by its own module.

Hooks hold on to the Training and the model weakly: somebody may keep a single module of a model that is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.engine import misuse
from stretto.engine.only_traced import is_only_traced
from stretto.engine.training import Training
from stretto.engine.weak_hook import take_off
from stretto.plain_state import ForwardHook

ReadElsewhere = dict[Tensor, nn.Module | None]  # parameter -> the module whose forward reads it, where that is not its own


class Readers:
    """Which module's forward reads which parameter. Watches from the beginning until `conclude`."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._called: set[nn.Module] = set()  # in the round under way
        self._own: dict[Tensor, bool] = {}  # whether one of its own modules ran in every round in which it had a gradient
        self._called_ever: set[nn.Module] = set()
        self._hooks = [module.register_forward_pre_hook(ForwardHook(self._note)) for module in self._names]

    def _note(self, module: nn.Module, arguments: Any) -> None:
        if not is_only_traced():
            self._called.add(module)

    def round_ended(self, with_gradient: Iterable[Tensor]) -> None:
        """A backward of what was called since the last one has given these parameters gradients."""
        read = {p for module in self._called for p in module._parameters.values() if p is not None}
        for parameter in with_gradient:
            self._own[parameter] = self._own.get(parameter, True) and parameter in read
        self._called_ever |= self._called
        self._called.clear()

    def close(self) -> None:
        """Watch no longer."""
        take_off(self._hooks)

    def conclude(self) -> ReadElsewhere:
        """The parameters that are read by another module than their own, and by which; None: before any forward of the model."""
        self.close()
        by_name = {name: module for module, name in self._names.items()}
        return {
            parameter: self._nearest(name, by_name)
            for module, name in self._names.items()
            for parameter in module._parameters.values()
            if parameter is not None and not self._own.get(parameter, True)
        }

    def _nearest(self, name: str, by_name: dict[str, nn.Module]) -> nn.Module | None:
        """The innermost module around this one whose forward was seen to run."""
        while name:
            name = name.rpartition(".")[0]
            if by_name[name] in self._called_ever:
                return by_name[name]
        return None


def before_each_use(
    model: nn.Module,
    called: nn.Module,
    optimizers: Iterable[Optimizer],
    training: Training[Any],
    read_elsewhere: ReadElsewhere,
) -> list[RemovableHandle]:
    """Have `training.before_use` called with what each module's forward reads, and with all parameters before `state_dict` and
    `load_state_dict` of the model, its modules and its optimizers. First in line: other hooks may read what is waited for.

    `called` is what the training loop calls. Where that is a compiled model, nobody calls modules: it waits for everything."""
    waiting = _Waiting(model, training)
    reads: dict[nn.Module, list[Tensor]] = {module: [] for module in with_parameters(model)}
    if called is not model:
        reads = {called: list(model.parameters())}
    else:
        for module in list(reads):
            for parameter in (p for p in module._parameters.values() if p is not None):
                reader = read_elsewhere.get(parameter, module)
                reads[model if reader is None else reader].append(parameter)
    hooks = [
        module.register_forward_pre_hook(ForwardHook(waiting.before_forward_of(parameters)), prepend=True)
        for module, parameters in reads.items()
    ]
    for module in with_parameters(model):
        hooks.append(module.register_state_dict_pre_hook(ForwardHook(waiting.before_looking)))  # type: ignore[no-untyped-call]
        hooks.append(module.register_load_state_dict_pre_hook(ForwardHook(waiting.before_loading)))  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        hooks.append(optimizer.register_state_dict_pre_hook(waiting.before_looking))
        hooks.append(optimizer.register_load_state_dict_pre_hook(waiting.before_loading))
    return hooks


def with_parameters(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if next(module.parameters(), None) is not None)


class _Waiting:
    """What the hooks call."""

    def __init__(self, model: nn.Module, training: Training[Any]) -> None:
        self._model = weakref.ref(model)
        self._training = weakref.ref(training)

    def before_forward_of(self, parameters: list[Tensor]) -> Callable[..., None]:
        numbers = [weakref.ref(parameter) for parameter in parameters]

        def before_forward(module: nn.Module, arguments: Any) -> None:
            if torch.compiler.is_compiling():
                if numbers:  # torch.compile then leaves this module as it is, or says that it cannot
                    raise misuse.compiled_too_late()
                return
            if is_only_traced():  # nothing may be updated in there
                self.refuse_if_postponed()
            elif torch.is_grad_enabled():
                self._wait([parameter for number in numbers if (parameter := number()) is not None])
            else:
                self.before_looking()

        return before_forward

    def _wait(self, parameters: Iterable[Tensor]) -> None:
        if (training := self._training()) is not None:
            training.before_use(parameters)

    def before_looking(self, *_: Any) -> None:
        if (model := self._model()) is not None:
            self._wait(model.parameters())

    def before_loading(self, *_: Any) -> None:
        if (training := self._training()) is not None:
            training.before_load()

    def refuse_if_postponed(self) -> None:
        training, model = self._training(), self._model()
        if training is not None and model is not None and any(training.is_stale(p) for p in model.parameters()):
            raise misuse.traced_too_early(type(model).__name__)
