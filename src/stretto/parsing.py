"""Reading a strategy from text: `repr` backwards, with a whitelist and never `eval`.

Understood are calls of known names, names of recipes, numbers, strings, True, False, None, tuples and unary minus; nothing else,
no attribute, no operator, no comprehension. Length and depth are bounded, so that a text from anywhere may be given.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Mapping
from typing import Any

from stretto import recipes
from stretto.errors import ConfigurationError, StrettoError
from stretto.strategy import ANSWERS, Strategy
from stretto.sync.delay_compensation import DelayCompensation

MAX_CHARACTERS = 4096
MAX_DEPTH = 8

# CPython 3.11 counts the depth of a syntax tree for the whole process: two threads that parse at once may get a SystemError.
_one_at_a_time = threading.Lock()


def parse(text: str, *, extra: Mapping[str, Callable[..., Any]] | None = None) -> Strategy:
    """The strategy that `text` describes: `Strategy(...)`, a recipe such as `ddp()`, or the name of one. `extra` adds names of
    your own (codecs, say).

    >>> parse("Strategy(schedule=WaitFree())").schedule
    WaitFree()
    """
    if not isinstance(text, str):
        raise ConfigurationError(f"parse({text!r}): give the text of a strategy, for instance 'Strategy(schedule=WaitFree())'.")
    if len(text) > MAX_CHARACTERS:
        raise ConfigurationError(f"a strategy of {len(text)} characters: at most {MAX_CHARACTERS} are read.")
    known = {**_names(), **(extra or {})}
    try:
        with _one_at_a_time:
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as problem:
        raise _unreadable(text, f"it is not an expression ({problem})") from None
    value = _value(tree, known, text, MAX_DEPTH)
    if not isinstance(value, Strategy):
        raise _unreadable(text, f"it describes {value!r}, which is not a Strategy")
    return value


def _names() -> dict[str, Callable[..., Any]]:
    answers = {kind.__name__: kind for kinds in ANSWERS.values() for kind in kinds}
    return {"Strategy": Strategy, "DelayCompensation": DelayCompensation, **answers, **recipes.by_name()}


def _value(node: ast.expr, known: Mapping[str, Callable[..., Any]], text: str, depth: int) -> Any:
    if depth == 0:
        raise _unreadable(text, f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool, type(None))):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_value(item, known, text, depth - 1) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _value(node.operand, known, text, depth - 1)
        if isinstance(operand, (int, float)):
            return -operand
    if isinstance(node, ast.Name) and node.id in recipes.by_name():
        return _made(node.id, known, text)  # a recipe may be given by its bare name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node, node.func.id, known, text, depth)
    hint = f"; write {node.id}(), with parentheses" if isinstance(node, ast.Name) and node.id in known else ""
    raise _unreadable(text, f"{ast.unparse(node)!r} is not understood{hint}")


def _call(node: ast.Call, name: str, known: Mapping[str, Callable[..., Any]], text: str, depth: int) -> Any:
    if name not in known:
        raise _unreadable(text, f"{name!r} is not known; known are {', '.join(sorted(known))}")
    arguments = [_value(argument, known, text, depth - 1) for argument in node.args]
    keywords = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _unreadable(text, "** is not understood")
        keywords[keyword.arg] = _value(keyword.value, known, text, depth - 1)
    return _made(name, known, text, *arguments, **keywords)


def _made(name: str, known: Mapping[str, Callable[..., Any]], text: str, *arguments: Any, **keywords: Any) -> Any:
    try:
        return known[name](*arguments, **keywords)
    except StrettoError:
        raise
    except (TypeError, ValueError) as problem:
        raise _unreadable(text, f"{name}: {problem}") from None


def _unreadable(text: str, why: str) -> ConfigurationError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return ConfigurationError(
        f"cannot read the strategy {shown!r}: {why}.\nWrite for instance Strategy(compress=ErrorFeedback(Sign())), or ddp()."
    )
