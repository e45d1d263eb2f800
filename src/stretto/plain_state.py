"""What a distributed model looks like to `copy.deepcopy`, `pickle` and `torch.save`: a plain one.

Hooks and the engine sit in the module's `__dict__`, which is what all three of them take. An entry `__getstate__` in that same
dictionary, which Python asks before the class, leaves ours out: copies combine nothing, `torch.load(weights_only=True)` and
programs without stretto can read what was saved, and `torch.jit.script` works on a copy.

Some classes (`torch.fx.GraphModule`) copy or pickle their `__dict__` themselves and never ask. For them each thing of ours in it
is one whose copy does nothing.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

GETSTATE = "__getstate__"
APPLY = "_apply"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
_ABOUT_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def look_plain(model: nn.Module, *ours: str, before: Callable[[], None]) -> None:
    """From now on copies of the model have neither our hooks nor the attributes named `ours`; `before` is called before one is
    made."""
    object.__setattr__(model, GETSTATE, _PlainState(model, (*ours, GETSTATE), before))


class _PlainState:
    """The entry `__getstate__` of one model."""

    def __init__(self, model: nn.Module, ours: tuple[str, ...], before: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._ours = ours
        self._before = before

    def __call__(self) -> Any:
        model = self._model()
        assert model is not None, "only the model itself leads here"
        self._before()
        return _without_ours(type(model).__getstate__(model), self._ours)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> _PlainState:
        model = self._model()
        assert model is not None, "it is copied with the model"
        return _PlainState(memo.get(id(model), model), self._ours, _do_nothing)

    def __reduce__(self) -> Any:
        return type(None), ()  # torch.fx makes a new module from its pickle and takes only what that does not have


class ForwardHook:
    """A method as a hook of a module's forward."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        self._method(*arguments)

    def __reduce__(self) -> Any:
        return ForwardHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


def look_as_before(model: nn.Module) -> None:
    model.__dict__.pop(GETSTATE, None)
    model.__dict__.pop(APPLY, None)


def convert_after(module: nn.Module, before: Callable[[], None]) -> None:
    """Have `before` called before `to`, `half`, `float` and the like change the module's parameters."""
    object.__setattr__(module, APPLY, _Conversion(module, before))


class _Conversion:
    """The entry `_apply` of one module."""

    def __init__(self, module: nn.Module, before: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._before = before

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        module = self._module()
        assert module is not None, "only the module itself leads here"
        self._before()
        return type(module)._apply(module, *arguments, **options)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> Any:
        return type(None), ()


def _without_ours(state: Any, ours: tuple[str, ...]) -> Any:
    if not isinstance(state, dict):  # the class has an idea of its own
        return state
    plain = {name: value for name, value in state.items() if name not in (*ours, APPLY)}
    removed: set[int] = set()
    for name in _HOOKS:
        kept = OrderedDict((number, hook) for number, hook in plain.get(name, {}).items() if not is_ours(hook))
        removed |= plain.get(name, {}).keys() - kept.keys()
        plain[name] = kept
    for name in _ABOUT_HOOKS:
        plain[name] = OrderedDict((number, flag) for number, flag in plain.get(name, {}).items() if number not in removed)
    return plain


def is_ours(hook: object) -> bool:
    """Whether a hook is one of stretto's and not the user's."""
    return str(getattr(hook, "__module__", "")).startswith("stretto.")
