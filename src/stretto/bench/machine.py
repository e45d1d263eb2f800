"""Where a measurement was made: a number without its machine and versions says nothing.

Among them whether Numba was there: without it codecs on the CPU are many times slower.
"""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec
import torch
import zmq

from stretto import __version__
from stretto.compress.kernels.compiling import has_numba

PACKAGES = ("torch", "numpy", "pyzmq", "msgspec")
WITHOUT_NUMBA = "none (codecs on the CPU in plain torch)"


class MachineInfo(msgspec.Struct, frozen=True, kw_only=True):
    processor: str
    cores: int
    memory_bytes: int
    system: str
    gpu: str | None
    versions: dict[str, str]


def describe() -> MachineInfo:
    versions = {"stretto": __version__, "python": platform.python_version(), "libzmq": zmq.zmq_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):  # it comes with torch's CUDA builds
        versions["triton"] = metadata.version("triton")
    return MachineInfo(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        versions=versions | {name: metadata.version(name) for name in PACKAGES} | {"numba": _numba()},
    )


def _numba() -> str:
    """Its version, unless a codec of this process has found that it cannot be used. (To ask anew would take a second.)"""
    asked = has_numba.cache_info().currsize > 0
    try:
        return metadata.version("numba") if not asked or has_numba() else WITHOUT_NUMBA
    except metadata.PackageNotFoundError:
        return WITHOUT_NUMBA


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, platform.processor() or platform.machine())
