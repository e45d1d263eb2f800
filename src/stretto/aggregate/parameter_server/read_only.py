"""A tensor over memory that may only be read, such as a message that a wire has received.

torch knows no tensors that cannot be written, and warns of memory that cannot. So the memory is given to it by its address; it is
for the caller to see that nothing writes there, and that the memory outlives the tensor.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def as_tensor(array: NDArray[np.float32]) -> Tensor:
    """The same memory, without a copy, where it can be read as it lies: contiguous, and each number at a multiple of 4 bytes."""
    if not (array.flags.c_contiguous and array.flags.aligned):
        return torch.from_numpy(array.copy())
    if array.flags.writeable or not array.size:
        return torch.from_numpy(array if array.size else array.copy())
    return torch.frombuffer((ctypes.c_char * array.nbytes).from_address(array.ctypes.data), dtype=torch.float32)
