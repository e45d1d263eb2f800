"""What a distributed model looks like to `copy.deepcopy`, `pickle` and `torch.save`: a plain one.

Hooks and the engine sit in the module's `__dict__`, which is what all three of them take. An entry `__getstate__` in that same
dictionary, which Python asks before the class, leaves ours out: copies combine nothing, `torch.load(weights_only=True)` and
programs without stretto can read what was saved, and `torch.jit.script` works on a copy.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

from torch import nn

GETSTATE = "__getstate__"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def look_plain(model: nn.Module, *ours: str) -> None:
    """From now on copies of the model have neither our hooks nor the attributes named `ours`."""
    reference = weakref.ref(model)

    def state() -> Any:
        this = reference()
        assert this is not None, "only the model itself leads here"
        return _without_ours(type(this).__getstate__(this), (*ours, GETSTATE))  # type: ignore[no-untyped-call]

    object.__setattr__(model, GETSTATE, state)


def look_as_before(model: nn.Module) -> None:
    model.__dict__.pop(GETSTATE, None)


def _without_ours(state: Any, ours: tuple[str, ...]) -> Any:
    if not isinstance(state, dict):  # the class has an idea of its own
        return state
    plain = {name: value for name, value in state.items() if name not in ours}
    removed: set[int] = set()
    for name in _HOOKS:
        kept = OrderedDict((number, hook) for number, hook in plain.get(name, {}).items() if not _is_ours(hook))
        removed |= plain.get(name, {}).keys() - kept.keys()
        plain[name] = kept
    for name in _ABOUT_HOOKS:
        plain[name] = OrderedDict((number, flag) for number, flag in plain.get(name, {}).items() if number not in removed)
    return plain


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("stretto.")
