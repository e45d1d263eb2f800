"""The plain `state_dict` of a model whose parameters are in slices, and loading one.

`state_dict()`, called on all workers, of the model or of a module of it: each parameter is gathered, and what its module finds
there while it writes its entry is a copy in host memory, so a module that does more with its entries (one that is cut over
workers puts them together) has values. With `keep_vars=True` entries are the parameters themselves, as ever, and nothing is
gathered.
`load_state_dict()`: every worker takes its slices out of what it is given. Nothing is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto.aggregate.zero.cut.freed import ParameterInSlices
from stretto.aggregate.zero.cut.memory import CutMemory
from stretto.engine.weak_hook import take_off
from stretto.plain_state import ForwardHook

Whole = Mapping[Tensor, Tensor]


class StateDicts:
    """Hooks on the modules of one model. `fetch`: copies of all parameters of a module."""

    def __init__(self, fetch: Callable[[nn.Module], Whole]) -> None:
        self._fetch = weakref.WeakMethod(fetch)
        self._memories: dict[Tensor, CutMemory] = {}
        self._whole: Whole = {}
        self._asked: nn.Module | None = None  # whose state_dict is being made
        self._given: dict[nn.Module, list[Tensor]] = {}
        self._hooks: list[RemovableHandle] = []

    def arrange(self, model: nn.Module, memories: list[CutMemory]) -> None:
        self.close()
        self._memories = {parameter: memory for memory in memories for parameter in memory.parameters}
        for module in model.modules():
            if next(module.parameters(), None) is None:
                continue
            self._hooks += [
                module.register_state_dict_pre_hook(ForwardHook(self._before)),  # type: ignore[no-untyped-call]
                module.register_state_dict_post_hook(ForwardHook(self._after)),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(ForwardHook(self._before_load)),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_post_hook(ForwardHook(self._after_load)),  # type: ignore[no-untyped-call]
            ]

    def close(self) -> None:
        take_off(self._hooks)
        self._hooks.clear()

    def _before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if prefix == "" or self._asked in (None, module):
            self._asked, self._whole = module, {}
            fetch = self._fetch()
            if not keep_vars and fetch is not None:
                self._whole = fetch(module)
        for parameter in _own(module):
            if parameter in self._whole:
                parameter.__class__ = ParameterInSlices  # also of one that is gathered now, and will not be later
                parameter.__dict__["in_state_dict"] = self._whole[parameter]

    def _after(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for parameter in _own(module):
            memory = self._memories.get(parameter)
            if parameter.__dict__.pop("in_state_dict", None) is not None and memory is not None and memory.is_gathered:
                memory.show()
        if module is self._asked:
            self._asked, self._whole = None, {}

    def _before_load(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        named = module._parameters.items()
        mine: list[Tensor] = [p for name, p in named if p is not None and p in self._memories and prefix + name in state_dict]
        self._given[module] = mine
        for parameter in mine:
            memory = self._memories[parameter]
            if not memory.is_there:
                memory.take()
            memory.loading += 1
            memory.show()

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        for parameter in self._given.pop(module, []):
            memory = self._memories[parameter]
            memory.loading -= 1
            with torch.inference_mode(False), torch.no_grad():
                for piece in memory.pieces():
                    if piece.parameter is parameter:
                        piece.weight.detach().copy_(piece.in_parameter)
            if memory.loading == 0 and not memory.is_gathered:
                memory.free()


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]
