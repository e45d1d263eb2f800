"""How a kernel says that a payload is malformed: it stores a number in the host's memory, and the host waits for it and looks.

Pinned memory that the device writes to by itself: no launch to clear a flag and no copy to fetch it, which would take as long as
decoding a few megabytes. One word for each thread is enough, since whoever takes it waits before anybody else can.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_of_thread = threading.local()


def new_flag(device: torch.device) -> Tensor:
    """0 until a kernel stores something else. Good until this thread takes the next one."""
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device="cpu")
    if not hasattr(_of_thread, "flag"):
        _of_thread.flag = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
    flag: Tensor = _of_thread.flag
    flag.zero_()
    return flag


def wait_for(flag: Tensor, device: torch.device) -> int:
    """What is stored when everything launched so far on the current stream has ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return int(flag)
