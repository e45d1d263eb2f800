"""Which values a checkpoint may hold: those that load without running code (`weights_only=True`), and where the others are.

torch refuses a checkpoint as a whole and names a class. Here the place is named, so that the line that put it there is
found: `extra['args']` is a Namespace.
"""

from __future__ import annotations

import dataclasses
import io
from argparse import Namespace
from collections import OrderedDict
from datetime import date, time
from enum import Enum
from pathlib import PurePath
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.errors import CheckpointError

PLAIN = (NoneType, bool, int, float, complex, str, bytes, bytearray, Tensor, nn.Parameter)

INSTEAD: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (np.generic, "its .item()"),
    (np.ndarray, "torch.from_numpy(...)"),
    ((Namespace, SimpleNamespace), "vars(...)"),
    (PurePath, "str(...)"),
    (Enum, "its .value"),
    ((date, time), "its .isoformat()"),
)


def check(value: Any, where: str) -> None:
    """Raise unless `value`, which the caller knows as `where`, can be loaded again. Looks into dicts, lists, tuples and sets."""
    _look(value, where, set())


def _look(value: Any, where: str, seen: set[int]) -> None:
    kind = type(value)
    if kind in PLAIN or id(value) in seen:
        return
    seen.add(id(value))  # what refers to itself is fine, and has no end
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            _look(key, f"the key {key!r} of {where}", seen)
            _look(item, f"{where}[{key!r}]", seen)
    elif kind in (list, tuple, set):
        for number, item in enumerate(value):
            _look(item, f"{where}[{number}]" if kind is not set else f"{item!r} in {where}", seen)
    elif not _loads(value):
        raise CheckpointError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, neither a tensor nor a plain value: loading it would mean to "
            f"run code that the file names.\n"
            f"Put {_instead(value)} there."
        )


def _loads(value: Any) -> bool:
    """Whether torch would load a value of this rarer type. Only torch knows: the user may have allowed some types."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:
        return False
    return True


def _instead(value: Any) -> str:
    for kinds, text in INSTEAD:
        if isinstance(value, kinds):
            return text
    if callable(getattr(value, "state_dict", None)):
        return "its .state_dict()"
    if dataclasses.is_dataclass(value):
        return "dataclasses.asdict(...)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "its ._asdict()"
    if isinstance(value, dict):
        return "dict(...)"
    return "numbers, text, None, lists, dicts or tensors"
