"""Memory of a GPU that several processes see (CUDA IPC): each worker's own, which it writes, and the others', which it reads.

The driver gives a handle of 64 bytes for memory that it has allocated; another process on the same GPU that gets these bytes can
map the memory. Nothing is left on the machine whatever happens to the processes. The memory is the driver's and not torch's: it
belongs to no pool that could give it to somebody else, and torch's settings for its own (expandable segments) do not matter.

The driver keeps memory as long as a process maps it, also if the one that made it has been killed (run on an H200: reading it
goes on and gives what was there). Its documentation promises less: whoever made it should free it last. So workers that exchange
their memory for other memory meet before they free it (`mapped.py`).

torch shares tensors between processes too, but with a file for each that a killed process leaves behind, and from its own pool.
So the driver is called, through ctypes: a few functions, whose binary interface NVIDIA keeps stable.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor

GRANULARITY = 2 << 20  # a smaller piece would share its block with other memory, which the others would see too
HANDLE_BYTES = 64
WHEN_NEEDED = 1  # the only flag: the driver opens the way between two GPUs when it is first used


class DeviceOffer(msgspec.Struct, frozen=True):
    """What another process needs to map this worker's memory: where it is (`gpu`: as `gpu_of` names it), and the handle."""

    gpu: str
    handle: bytes
    num_bytes: int


def gpu_of(device: torch.device) -> str:
    """The same in every process that uses this GPU, whatever number it has there."""
    return str(torch.cuda.get_device_properties(device).uuid)


class OwnDeviceMemory:
    """Memory of a GPU that this worker writes. Raises OSError where the driver gives none."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        size = -(-max(1, num_bytes) // GRANULARITY) * GRANULARITY
        driver, address, handle = _Driver(device), ctypes.c_uint64(), (ctypes.c_char * HANDLE_BYTES)()
        torch.cuda.empty_cache()  # what torch keeps for later the driver could not give us
        driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.bytes = _tensor(driver, address, num_bytes, "cuMemFree_v2")
        driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.offer = DeviceOffer(gpu_of(device), handle.raw, num_bytes)


def map_device(offer: DeviceOffer, device: torch.device) -> Tensor:
    """Another worker's memory, as bytes. Raises OSError or ValueError with what is wrong."""
    if len(offer.handle) != HANDLE_BYTES or offer.num_bytes < 0:
        raise ValueError(f"a handle of {len(offer.handle)} bytes for {offer.num_bytes} bytes of memory")
    if offer.gpu != gpu_of(device):
        raise ValueError(f"memory of GPU {offer.gpu}, where this worker computes on {gpu_of(device)}")
    driver, address, base, size = _Driver(device), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
    driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(offer.handle), ctypes.c_uint(WHEN_NEEDED))
    mapped = _tensor(driver, address, offer.num_bytes, "cuIpcCloseMemHandle")
    driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    if size.value < offer.num_bytes:
        raise ValueError(f"{size.value} bytes of memory where {offer.num_bytes} were offered")
    return mapped


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Driver:
    """The functions of libcuda, called for one GPU."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._library = ctypes.CDLL("libcuda.so.1")
        self.device = device

    def __call__(self, function: str, *arguments: Any) -> None:
        code = self._try(function, *arguments)
        if code != 0:
            self._refuse(function, code)

    def give_back(self, function: str, address: ctypes.c_uint64) -> None:
        """Once the GPU has done all that it was asked to: some of it may use this memory."""
        with contextlib.suppress(RuntimeError):  # a GPU that has failed has nothing to give back
            torch.cuda.synchronize(self.device)
            self._try(function, address)

    def _try(self, function: str, *arguments: Any) -> int:
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()  # the runtime makes this GPU's context the current one of this thread
            code: int = getattr(self._library, function)(*arguments)
        return code

    def _refuse(self, function: str, code: int) -> NoReturn:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        reason = f"error {code}" if name.value is None else name.value.decode()
        raise OSError(f"the CUDA driver refused {function.removesuffix('_v2')}: {reason}")


class _Lent:
    """Memory as the array interface describes it: torch makes a tensor of it, and keeps this object as long as the tensor."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def _tensor(driver: _Driver, address: ctypes.c_uint64, num_bytes: int, give_back: str) -> Tensor:
    """Memory as bytes, given back by this function of the driver with the last tensor on it; at the end of the process by the
    driver itself."""
    lent = _Lent(address.value, max(1, num_bytes))
    weakref.finalize(lent, driver.give_back, give_back, address).atexit = False
    return torch.as_tensor(lent, device=driver.device)[:num_bytes]
