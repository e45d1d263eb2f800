"""Spans of what the training thread does: forward, backward, the optimizer's update, and inside them each module's part.

Backward begins when the gradient of one of the model's outputs is known and ends with autograd's own work; waiting for what is
then still under way is a `wait` span behind it. A backward that raises leaves no span but those of modules that it was done with.

Modules that have parameters of their own have spans of category `module`, named as in `model.named_modules()`:

    within forward     from the beginning of its forward to its end, those of its children inside it
    within backward    from the last gradient before its own to the last of its own. Autograd tells nothing more, so what it
                       computes in between, activations included, belongs to the module whose gradient comes next.

All times are the host's. On a GPU they show when work was queued, not when it ran.

Hooks of their own, set only while tracing. Inside what is compiled they do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.observe.trace import Tracer
from stretto.plain_state import ForwardHook
from stretto.tensors_in import tensors_in


def trace_compute(
    tracer: Tracer, model: nn.Module, optimizers: Sequence[Optimizer], modules: nn.Module | None = None
) -> list[RemovableHandle]:
    """Set the hooks on the model that is called, first in line: their callback at the end of backward comes before the engine's.
    `modules` is the model whose modules are shown and whose names they have, if that is another one (under `torch.compile`)."""
    passes = _Passes(tracer, type(model).__name__)
    handles = _trace_modules(passes, model if modules is None else modules)
    handles.append(model.register_forward_pre_hook(ForwardHook(passes.forward_begins), prepend=True))
    handles.append(model.register_forward_hook(ForwardHook(passes.forward_ends), prepend=True))
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(passes.update_begins))
        handles.append(optimizer.register_step_post_hook(passes.update_ends))
    return handles


def _trace_modules(passes: _Passes, model: nn.Module) -> list[RemovableHandle]:
    """The model's own forward has a span already; its own parameters, if any, have the model's class as the name in backward."""
    handles, seen = [], set[Tensor]()
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if not own:
            continue
        if module is not model:
            handles.append(module.register_forward_pre_hook(_NamedHook(passes.module_begins, name)))
            handles.append(module.register_forward_hook(_NamedHook(passes.module_ends, name), prepend=True, always_call=True))
        for parameter in own:
            if parameter.requires_grad and parameter not in seen:  # one that is shared belongs to the first module that has it
                seen.add(parameter)
                hook = _gradient_hook(passes, name or type(model).__name__)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles


def _gradient_hook(passes: _Passes, name: str) -> Callable[[Tensor], None]:
    """It holds on to names and times only: hooks on tensors are beyond the garbage collector's sight."""

    def gradient_ready(parameter: Tensor) -> None:
        passes.gradient_ready(name)

    return gradient_ready


class _NamedHook(ForwardHook):
    """Tells that something happens in the forward of a module, by its name; not while that is compiled."""

    def __init__(self, method: Callable[[str], None], name: str) -> None:
        super().__init__(method)
        self._name = name

    def __call__(self, *_: Any) -> None:
        if not is_compiling():
            self._method(self._name)


class _Passes:
    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name
        self._thread = threading.get_ident()
        self._forward_ns: list[int] = []  # a stack: a model may call itself
        self._modules: list[tuple[str, int]] = []  # whose forwards are open, and since when
        self._backward_ns: int | None = None
        self._gradients_of: str | None = None  # the module whose gradients come now, since when, and when the last one came
        self._gradients_ns = (0, 0)
        self._update_ns = 0

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward_begins(self, module: nn.Module, arguments: Any) -> None:
        self._thread = threading.get_ident()
        if torch._C._current_graph_task_id() == -1:  # else it is the recomputation of a checkpointed forward
            self._backward_ns = None  # what is left is of a backward that ended in an exception
        self._forward_ns.append(self._tracer.now())

    def forward_ends(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._tracer.span("compute", f"forward {self._name}", self._forward_ns.pop())
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def module_begins(self, name: str) -> None:
        self._modules.append((name, self._tracer.now()))

    def module_ends(self, name: str) -> None:
        """Also when it has raised, as a recomputation does that needs no more; perhaps in another hook, before it has begun."""
        if self._modules and self._modules[-1][0] == name:
            self._tracer.span("module", name, self._modules.pop()[1])

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._backward_ns is None:
            self._backward_ns = self._tracer.now()
            self._gradients_of, self._gradients_ns = None, (self._backward_ns, self._backward_ns)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def gradient_ready(self, name: str) -> None:
        if self._backward_ns is None:
            return  # the model's own forward was not called: nobody knows when this backward began
        begin, last = self._gradients_ns
        if name != self._gradients_of:
            self._end_of_gradients()
            self._gradients_of, begin = name, last
        self._gradients_ns = (begin, self._tracer.now())

    def _end_of_gradients(self) -> None:
        if self._gradients_of is not None:
            begin, end = self._gradients_ns
            self._tracer.span("module", self._gradients_of, begin, end_ns=end, thread=self._thread)
            self._gradients_of = None

    def _backward_ends(self) -> None:
        if self._backward_ns is not None:
            self._end_of_gradients()
            self._tracer.span("compute", f"backward {self._name}", self._backward_ns, thread=self._thread)
            self._backward_ns = None

    # -- update -------------------------------------------------------------------------------------------------------

    def update_begins(self, *_: Any) -> None:
        self._update_ns = self._tracer.now()

    def update_ends(self, *_: Any) -> None:
        self._tracer.span("update", "update", self._update_ns)
