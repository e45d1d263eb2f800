"""Adding, and otherwise combining, what arrives into what is there.

One pass over the incoming bytes, straight from the wire's memory. NumPy does it for the types it is fast at; float16, bfloat16
and complex go through torch. NumPy runs in the calling thread alone, where torch would start a team of threads for each segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import ConfigurationError
from stretto.wire.frames import DTYPE_CODES, DTYPE_NAMES

Op = Literal["sum", "mean", "min", "max", "product", "bit_and", "bit_or", "bit_xor"]
OPS: tuple[str, ...] = get_args(Op)

_UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "bit_and": np.bitwise_and,
    "bit_or": np.bitwise_or,
    "bit_xor": np.bitwise_xor,
}
BITWISE: tuple[str, ...] = ("bit_and", "bit_or", "bit_xor")
_TORCH_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
}
_NUMPY_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_code(dtype: torch.dtype) -> int:
    name = dtype_name(dtype)
    if name not in DTYPE_CODES:
        raise ConfigurationError(
            f"a tensor of {dtype} cannot travel: no wire format for it.\nConvert it to one of {', '.join(DTYPE_NAMES[1:])}."
        )
    return DTYPE_CODES[name]


def check_op(op: str, dtype: torch.dtype) -> None:
    """Refuse what has no meaning for this type, before anything is sent."""
    if op not in OPS:
        raise ConfigurationError(f"op={op!r} is not known. Write one of {', '.join(map(repr, OPS))}.")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(
            f"the mean of {dtype} tensors is not a {dtype_name(dtype)}. Use op='sum', or convert to a floating-point type."
        )
    if dtype is torch.bool and op in ("sum", "product"):
        raise ConfigurationError(f"op={op!r} of bool tensors: use op='max' (any) or op='min' (all), or convert to int.")
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"op={op!r} of {dtype} tensors: it works on bits. Give integers or bools, or use another op.")
    if dtype.is_complex and op in ("min", "max"):
        raise ConfigurationError(f"op={op!r}: complex numbers have no order. Use 'sum', 'mean' or 'product'.")


class Accumulator:
    """One flat buffer seen as bytes (to send) and as numbers (to combine)."""

    def __init__(self, flat: torch.Tensor, op: str, scale: float | None) -> None:
        as_bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        if flat.is_inference() and flat.numel():  # in our thread, torch would not write to it
            flat = torch.from_numpy(as_bytes).view(flat.dtype)
        self.flat = flat
        self.itemsize = flat.element_size()
        self.scale = scale
        self._op = op
        self.raw: NDArray[np.uint8] = as_bytes
        self.view = self.raw.data
        numpy_dtype = _NUMPY_DTYPES.get(flat.dtype)
        self._numbers: NDArray[Any] | None = None if numpy_dtype is None else as_bytes.view(numpy_dtype)
        self._ufunc = _UFUNCS[op]

    def num_bytes(self, start: int, stop: int) -> int:
        """The length of a message with this range."""
        return (stop - start) * self.itemsize

    def bytes_of(self, start: int, stop: int) -> memoryview:
        return self.view[start * self.itemsize : stop * self.itemsize]

    def place(self, start: int, stop: int) -> memoryview | None:
        """Where a wire may put what is to be copied in, if it may lie there as it arrives."""
        return self.view[start * self.itemsize : stop * self.itemsize]

    def copy_in(self, start: int, stop: int, incoming: memoryview) -> None:
        np.copyto(self.raw[start * self.itemsize : stop * self.itemsize], np.frombuffer(incoming, np.uint8))

    def combine(self, start: int, stop: int, incoming: memoryview, *, final: bool, arrived_first: bool = False) -> None:
        """`arrived_first`: op(arrived, mine), not op(mine, arrived). They differ for signed zeros and NaNs."""
        if self._numbers is not None:
            target = self._numbers[start:stop]
            arrived = np.frombuffer(incoming, target.dtype)
            with np.errstate(all="ignore"):  # an overflow is an infinity, as in torch, and no warning
                self._ufunc(*((arrived, target) if arrived_first else (target, arrived)), out=target)
                if final and self.scale is not None:
                    np.multiply(target, target.dtype.type(self.scale), out=target)
        else:
            self._combine_in_torch(start, stop, incoming, final=final, arrived_first=arrived_first)

    def _combine_in_torch(self, start: int, stop: int, incoming: memoryview, *, final: bool, arrived_first: bool) -> None:
        target = self.flat[start:stop]
        if not len(target):
            return  # torch takes no bytes for no numbers
        # torch refuses memory that it may not write to, which arriving bytes are: one copy into memory of our own
        arrived = torch.from_numpy(np.frombuffer(incoming, np.uint8).copy()).view(target.dtype)
        _TORCH_OPS[self._op](*((arrived, target) if arrived_first else (target, arrived)), out=target)
        if final and self.scale is not None:
            target.mul_(self.scale)

    def finish(self, start: int, stop: int) -> None:
        """Scale what was completed by local work alone."""
        if self.scale is not None:
            self.flat[start:stop].mul_(self.scale)
