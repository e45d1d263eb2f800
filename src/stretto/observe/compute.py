"""Spans of what the training thread does: forward, backward, the optimizer's update. Hooks of their own, set only while tracing.

Backward begins when the gradient of one of the model's outputs is known and ends with autograd's own work; waiting for what is
then still under way is a `wait` span behind it. A backward that raises leaves no span.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.observe.trace import Tracer
from stretto.plain_state import ForwardHook
from stretto.tensors_in import tensors_in


def trace_compute(tracer: Tracer, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[RemovableHandle]:
    """Set the hooks, first in line: their callback at the end of backward comes before the engine's."""
    passes = _Passes(tracer, type(model).__name__)
    handles = [
        model.register_forward_pre_hook(ForwardHook(passes.forward_begins), prepend=True),
        model.register_forward_hook(ForwardHook(passes.forward_ends), prepend=True),
    ]
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(passes.update_begins))
        handles.append(optimizer.register_step_post_hook(passes.update_ends))
    return handles


class _Passes:
    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name
        self._thread = threading.get_ident()
        self._forward_ns: list[int] = []  # a stack: a model may call itself
        self._backward_ns: int | None = None
        self._update_ns = 0

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

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._backward_ns is None:
            self._backward_ns = self._tracer.now()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        if self._backward_ns is not None:
            self._tracer.span("compute", f"backward {self._name}", self._backward_ns, thread=self._thread)
            self._backward_ns = None

    def update_begins(self, *_: Any) -> None:
        self._update_ns = self._tracer.now()

    def update_ends(self, *_: Any) -> None:
        self._tracer.span("update", "update", self._update_ns)
