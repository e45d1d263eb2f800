"""Hooks of modules and of autograd: when a unit is gathered, and when it is free again.

    before the forward of one of its modules     gathered, and the next one's gather begins
    after it                                     free, when all of its modules have run
    before the backward of an output             gathered again
    gradients of its parameters and inputs       free, when all of them are there: nothing reads it any more
    end of the model's forward, of backward      whatever is left is free

A forward within a backward is the recomputation of a checkpointed one: what it gathers stays for the backward that follows.

Nothing is sent and nobody is waited for while an exception is in flight: what a failed pass has left is tidied up when the next
one begins, or by the next step. Hooks refer to this object weakly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto.aggregate.zero.cut.gathering import BACKWARD, FORWARD, WITHOUT_GRADIENTS, CutUnit, Gatherer
from stretto.engine.end_of_backward import NO_TASK, EndOfBackward, current_task
from stretto.engine.only_traced import is_only_traced
from stretto.engine.weak_hook import take_off, weakly
from stretto.errors import ConfigurationError
from stretto.plain_state import ForwardHook
from stretto.tensors_in import tensors_in


class Passes:
    """The hooks of one model that gather its units and free them. See the module's text."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._hooks: list[RemovableHandle] = []
        self._task = NO_TASK
        self._number = 0  # of the backward
        self._is_dirty = False  # a pass has failed, or somebody has been shown all values

    def arrange(self, units: Sequence[CutUnit]) -> None:
        """Set hooks on all modules and parameters of these units."""
        self.close()
        model = units[0].modules[0] if units else None
        for unit in units:
            for module in unit.modules:
                enter = ForwardHook(self._weak_pair(Passes._enter, unit.number))
                leave = ForwardHook(self._weak_pair(Passes._leave, unit.number))
                first = module is not model  # before that the engine closes a round that is open
                self._hooks.append(module.register_forward_pre_hook(enter, prepend=first, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
            for memory in unit.memories:
                for parameter in memory.parameters:
                    if parameter.requires_grad:
                        hook = self._weak_pair(Passes._accumulated, unit.number)
                        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _weak_pair(self, method: Callable[..., None], number: int) -> Callable[..., None]:
        reference = weakref.ref(self)

        def hook(*arguments: Any) -> None:
            if (alive := reference()) is not None:
                method(alive, number, *arguments)

        return hook

    def close(self) -> None:
        take_off(self._hooks)
        self._hooks.clear()

    def mark_dirty(self) -> None:
        """Before the next pass everything is to be free."""
        self._is_dirty = True

    def tidy(self) -> None:
        """No pass is under way: everything is free."""
        self._is_dirty = False
        self._task = NO_TASK
        for unit in self._gatherer.units:
            unit.active = 0
        self._gatherer.end_pass()

    # -- forward ------------------------------------------------------------------------------------------------------

    def _enter(self, number: int, module: nn.Module, arguments: Any, keywords: Any = None) -> None:
        if is_only_traced():
            return
        in_backward = current_task() != NO_TASK
        unit = self._gatherer.units[number]
        if self._is_dirty and not in_backward and not any(each.active for each in self._gatherer.units):
            self.tidy()
        unit.active += 1
        kind = None if in_backward else FORWARD if torch.is_grad_enabled() else WITHOUT_GRADIENTS
        self._gatherer.bring(unit, kind)
        if torch.is_grad_enabled() and not in_backward:
            expected = [tensor for tensor in tensors_in((arguments, keywords)) if tensor.requires_grad]
            unit.inputs += len(expected)
            for tensor in expected:
                tensor.register_hook(weakly(self._input_done, number))  # type: ignore[no-untyped-call]

    def _leave(self, number: int, module: nn.Module, *given: Any) -> None:
        if is_only_traced():
            return
        output = given[-1]
        unit = self._gatherer.units[number]
        unit.active = max(unit.active - 1, 0)
        unit.ran.add(module)
        if sys.exc_info()[0] is not None and output is None:
            self._is_dirty = True
            return
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(weakly(self._before_backward, number))  # type: ignore[no-untyped-call]
        if current_task() != NO_TASK or unit.active:
            return
        if number == 0 and module is unit.modules[0]:
            self._gatherer.end_pass()
        elif number == 0 or unit.ran.issuperset(unit.modules):
            unit.ran.clear()
            self._gatherer.release(unit)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                f"a derivative with create_graph=True of {self._gatherer.name}: with shard=Zero(3) its parameters are free when "
                f"backward has used them, and a derivative of the derivative would read them again.\n"
                f"Write shard=Zero(2), with which every worker has all weights."
            )
        if self._is_dirty and self._task == NO_TASK:
            self.tidy()
        if self._task == NO_TASK:
            self._task = current_task()
            self._number += 1
            EndOfBackward(self, self._number)
        self._gatherer.bring(self._gatherer.units[number], BACKWARD)

    def _input_done(self, number: int, gradient: Tensor) -> None:
        unit = self._gatherer.units[number]
        unit.inputs_done += 1
        self._free_if_done(unit)

    def _accumulated(self, number: int, parameter: Tensor) -> None:
        unit = self._gatherer.units[number]
        unit.accumulated += 1
        self._free_if_done(unit)

    def _free_if_done(self, unit: CutUnit) -> None:
        if unit.accumulated >= unit.num_trainable and unit.inputs_done >= unit.inputs and not unit.active:
            unit.begin_pass()
            unit.inputs = 0
            self._gatherer.release(unit)

    def end_of_backward(self) -> None:
        self._task = NO_TASK
        for unit in self._gatherer.units:
            unit.inputs = 0
        self._gatherer.end_pass()

    def backward_died(self, number: int) -> None:
        if number == self._number:
            self._task, self._is_dirty = NO_TASK, True
