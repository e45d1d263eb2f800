"""Reading a value from text: `repr` backwards, with a whitelist and never `eval`.

Understood are calls of known names, numbers, strings, True, False, None, tuples and unary minus; nothing else, no attribute, no
operator, no comprehension. Length and depth are bounded, so that a text from anywhere may be given.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.errors import ConfigurationError, StrettoError

MAX_CHARACTERS = 4096
MAX_DEPTH = 8

# CPython 3.11 counts the depth of a syntax tree for the whole process: two threads that parse at once may get a SystemError.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class CallReader:
    """`known`: what may be called, by name. `bare`: which of these may stand without parentheses. `what` is read, and an
    `example` of it: for messages."""

    known: Mapping[str, Callable[..., Any]]
    what: str
    example: str
    bare: Collection[str] = ()

    def read(self, text: str) -> Any:
        """The value that this text describes, or `ConfigurationError`."""
        if len(text) > MAX_CHARACTERS:
            raise ConfigurationError(f"a {self.what} of {len(text)} characters: at most {MAX_CHARACTERS} are read.")
        try:
            with _one_at_a_time:
                tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as problem:
            raise self.unreadable(text, f"it is not an expression ({problem})") from None
        return self._value(tree, text, MAX_DEPTH)

    def _value(self, node: ast.expr, text: str, depth: int) -> Any:
        if depth == 0:
            raise self.unreadable(text, f"it is nested more than {MAX_DEPTH} deep")
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool, type(None))):
            return node.value
        if isinstance(node, ast.Tuple):
            return tuple(self._value(item, text, depth - 1) for item in node.elts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self._value(node.operand, text, depth - 1)
            if isinstance(operand, (int, float)):
                return -operand
        if isinstance(node, ast.Name) and node.id in self.bare:
            return self._made(node.id, text)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(node, node.func.id, text, depth)
        hint = f"; write {node.id}(), with parentheses" if isinstance(node, ast.Name) and node.id in self.known else ""
        raise self.unreadable(text, f"{ast.unparse(node)!r} is not understood{hint}")

    def _call(self, node: ast.Call, name: str, text: str, depth: int) -> Any:
        if name not in self.known:
            raise self.unreadable(text, f"{name!r} is not known; known are {', '.join(sorted(self.known))}")
        arguments = [self._value(argument, text, depth - 1) for argument in node.args]
        keywords = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.unreadable(text, "** is not understood")
            keywords[keyword.arg] = self._value(keyword.value, text, depth - 1)
        return self._made(name, text, *arguments, **keywords)

    def _made(self, name: str, text: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            return self.known[name](*arguments, **keywords)
        except StrettoError:
            raise
        except (TypeError, ValueError) as problem:
            raise self.unreadable(text, f"{name}: {problem}") from None

    def unreadable(self, text: str, why: str) -> ConfigurationError:
        shown = text if len(text) <= 200 else text[:200] + "..."
        return ConfigurationError(f"cannot read the {self.what} {shown!r}: {why}.\nWrite for instance {self.example}.")
