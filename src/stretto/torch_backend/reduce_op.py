"""torch's names of operations, and ours."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import ConfigurationError

_OURS: Final = {
    "SUM": "sum",
    "AVG": "mean",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "bit_and",
    "BOR": "bit_or",
    "BXOR": "bit_xor",
}


def our_op(op: dist.ReduceOp) -> str:
    """The operation under our name."""
    for theirs, ours in _OURS.items():
        if _is(op, theirs):
            return ours
    raise ConfigurationError(f"{op} is not known here. Use one of {', '.join(_OURS)} or PREMUL_SUM.")


def is_premultiplied(op: dist.ReduceOp) -> bool:
    return _is(op, "PREMUL_SUM")


def _is(op: Any, name: str) -> bool:
    return bool(op == getattr(dist.ReduceOp, name))


def premultiplied(tensor: Tensor, op: dist.ReduceOp) -> Tensor:
    """What is summed instead: the tensor times the factor that the operation carries."""
    state: Any = op.__getstate__()
    factor = op.factor if hasattr(op, "factor") else state[1]
    with torch.no_grad():
        return tensor.detach() * factor
