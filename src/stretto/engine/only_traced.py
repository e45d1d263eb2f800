"""Forwards that must leave the job alone, although the module's hooks run.

Hooks run whenever a module is called, also where nothing is trained:

    only looked at     torch.compile, torch.export and torch.jit.trace run the model to see what it would compute. Its tensors
                       hold no numbers, and a collective would become part of the graph, or end in an error.
    transformed        inside torch.func (grad, vmap, ...) tensors stand for others, and no gradient reaches a parameter.
    other parameters   torch.func.functional_call puts other tensors in the place of the parameters, for one call: the weights of
                       a teacher, or the inner steps of meta-learning. They are the caller's, not new parameters of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from stretto.engine.end_of_backward import NO_TASK, current_task

_FAKE = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)
_FUNCTIONAL_CALL = getattr(getattr(stateless, "_functional_call", None), "__code__", None)  # where torch's own ends


def is_only_traced() -> bool:
    """Whether the forward under way is looked at or transformed rather than computed."""
    return (
        torch.compiler.is_compiling()  # the first, and known while compiling: then nothing of this becomes part of the graph
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (_FAKE is not None and torch._C._get_dispatch_mode(_FAKE) is not None)
    )


def leads_to_training(module: nn.Module) -> bool:
    """Whether a backward may follow the forward that begins, or buffers may change in it. One within a backward is the
    recomputation of a checkpointed one."""
    if is_only_traced() or torch.is_inference_mode_enabled() or current_task() != NO_TASK:
        return False
    return module.training or torch.is_grad_enabled()


def are_others(members: Iterable[nn.Module | Tensor | None]) -> bool:
    """Whether a model whose members have changed has other parameters for the length of this call only."""
    tensors = (member for member in members if isinstance(member, Tensor))
    return any(not isinstance(tensor, nn.Parameter) or not tensor.is_leaf for tensor in tensors) or in_functional_call()


def in_functional_call() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL:
            return True
        frame = frame.f_back
    return False
