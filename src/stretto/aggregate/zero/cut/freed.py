"""What a parameter is while its values are in slices: the same object, with its shape and gradient, and no values.

torch reads memory that is not there without asking, and the process ends. So for as long as a parameter is free its class is
`ParameterInSlices`, which answers what can be said without values and refuses the rest in words. A module's entry in a
`state_dict` is `p.detach()`: for as long as that is made, there is a copy of its values `in_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import ConfigurationError

WITHOUT_VALUES = frozenset(
    ["size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
     "element_size", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__hash__",
     "__len__", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "is_same_size", "storage_offset",
     "new_empty", "new_zeros", "new_ones", "new_full", "get_device", "untyped_storage", "is_conj", "is_neg", "is_inference",
     "is_distributed", "is_shared", "is_pinned", "is_coalesced"]
)  # fmt: skip
_DATA: Any = Tensor.data
OF_VALUES = (_DATA.__get__, _DATA.__set__)


class ParameterInSlices(nn.Parameter):
    """See the module's text."""

    in_state_dict: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.detach and args[0].in_state_dict is not None:
                return args[0].in_state_dict
            name = getattr(func, "__name__", "")
            if name in WITHOUT_VALUES or (name in ("__get__", "__set__", "__delete__") and func not in OF_VALUES):
                return func(*args, **(kwargs or {}))
            shapes = [tuple(each.shape) for each in (*args, *(kwargs or {}).values()) if isinstance(each, ParameterInSlices)]
        raise is_in_slices(name, shapes[0] if shapes else ())

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter in slices of shape {tuple(self.shape)}, {self.dtype}, requires_grad={self.requires_grad}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise is_in_slices("copy.deepcopy", tuple(self.shape))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise is_in_slices("pickle", tuple(self.shape))


def is_in_slices(what: str, shape: tuple[int, ...]) -> ConfigurationError:
    return ConfigurationError(
        f"{what} of a parameter of shape {shape} that is in slices: with shard=Zero(3) its values are together only while a "
        f"module that it belongs to computes.\n"
        f"Write `with stretto.gathered(model):` around what reads or changes weights, on all workers; or call the module "
        f"instead of reading its weight; or train with shard=Zero(2), with which every worker has all weights."
    )
