"""What a collective takes: tensors whose memory can be read (and written) here, and plain numbers.

All else is refused in the caller's thread. The communication thread reads memory and knows nothing of the program: a tensor
without memory of its own (on the meta device, sparse, traced) would fail there, far from the line that it came from.
"""

from __future__ import annotations

import torch

from stretto.errors import ConfigurationError

Number = float  # which, to type checkers, bool and int are too


def check_tensor(call: str, tensor: object, *, writes: bool = True) -> None:
    """Refuse what is not a tensor in memory. `writes`: the collective replaces its values."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigurationError(f"{call} of {_named(tensor)}: a tensor is needed. {_instead(tensor)}")
    problem = _problem(tensor) or (_problem_when_written(tensor) if writes else None)
    if problem is not None:
        raise ConfigurationError(f"{call} of a tensor {problem}")


def _problem(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}: its values do not lie in one block of memory. Write tensor.to_dense()."
    if tensor.is_quantized:
        return f"of {tensor.dtype}: sums of quantized numbers are not numbers on that scale. Write tensor.dequantize()."
    if tensor.is_meta:
        return "on the meta device: it has a shape, but no values to send. Make it on a device that has memory: device='cpu'."
    if not (tensor.is_cpu or tensor.is_cuda):
        return f"on {tensor.device}: only the memory of CPUs and CUDA devices can be read. Write tensor.cpu()."
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"of the class {type(tensor).__name__}, which stands for values elsewhere (traced, sharded or wrapped). "
            f"Give a plain tensor; of a DTensor, tensor.to_local()."
        )
    return None


def _problem_when_written(tensor: torch.Tensor) -> str | None:
    if tensor.is_contiguous():
        return None
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return (
            f"of shape {tuple(tensor.shape)} and strides {tensor.stride()}: several elements share one place in memory "
            f"(expand), so there is no room for the result. Write tensor.contiguous()."
        )
    return None


def as_number(call: str, value: object) -> Number:
    """A Python number; NumPy's are converted."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise ConfigurationError(f"{call} of {_named(value)}: a tensor or a number is needed. {_instead(value)}")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ConfigurationError(f"{call} of {value}: whole numbers travel in 64 bits. Use float({value}).")
    return value


def as_tensor(number: Number, op: str) -> torch.Tensor:
    """For an all-reduce: in float64 if the result need not be whole."""
    whole = isinstance(number, int) and op != "mean"
    return torch.tensor([number], dtype=torch.int64 if whole else torch.float64, device="cpu")


def as_before(result: torch.Tensor, number: Number, op: str) -> Number:
    """The result of `as_tensor`: any and all of truth values are one again; their sum is a count, and a mean is a fraction."""
    value: Number = result.item()
    return bool(value) if isinstance(number, bool) and op in ("min", "max") else value


def _named(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _instead(value: object) -> str:
    if type(value).__module__ == "numpy":
        return "Write torch.from_numpy(array)."
    if isinstance(value, (list, tuple)):
        return "Write torch.tensor(values), or gather_object(values) for every rank's own."
    return "For other values there is gather_object(value)."
