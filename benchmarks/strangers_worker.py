"""One worker of `strangers.py`: python benchmarks/strangers_worker.py FOLDER BACKEND DOING

It joins the job and says so (`here<rank>`), then repeats steps until it is told to stop, and says how long each took, and how
much memory it had (`report<rank>`). The number in the file `phase` is the phase of the measurement: rank 0 reads it, and it
travels with the step, so that all ranks count a step to the same phase. With DOING=idle there is no step in phase 1: everybody
waits for the next one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import stretto

STEP_BYTES = 16 << 20
END = 9  # the phase that is none


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float  # from the start of the program's own work until all had met
    address: str
    pid: int


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    seconds: dict[int, list[float]]  # phase -> of each step
    peak_bytes: dict[int, int]  # phase -> most resident memory
    peaks_are_of_phases: bool = True  # False: the kernel does not let us forget a peak, so each is the most since the start
    error: str = ""


def main(folder: Path, backend: str, doing: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    began = time.monotonic()
    reduce, address = _join(backend)
    put(folder / f"here{rank}", Joined(seconds=time.monotonic() - began, address=address, pid=os.getpid()))
    seconds: dict[int, list[float]] = {}
    peaks: dict[int, int] = {}
    error = ""
    try:
        _repeat(folder, rank, reduce, doing, seconds, peaks)
        if backend == "stretto":
            stretto.shutdown()  # whoever is a little behind is not to take this end for a loss
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    told_apart = _forget_peak()
    put(folder / f"report{rank}", WorkerReport(seconds=seconds, peak_bytes=peaks, peaks_are_of_phases=told_apart, error=error))
    os._exit(bool(error))  # gloo may wait for long in its own end


def _join(backend: str) -> tuple[Callable[[torch.Tensor], object], str]:
    if backend == "gloo":
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
        return dist.all_reduce, ""
    job = stretto.init()
    address = getattr(job.wire, "address", "")
    return lambda tensor: stretto.all_reduce(tensor, "sum", algorithm="ring"), address


def _repeat(
    folder: Path,
    rank: int,
    reduce: Callable[[torch.Tensor], object],
    doing: str,
    seconds: dict[int, list[float]],
    peaks: dict[int, int],
) -> None:
    tensor = torch.zeros(STEP_BYTES // 4)
    phase = 0
    while phase != END:
        while doing == "idle" and read_phase(folder) == 1:
            time.sleep(0.05)
        tensor.zero_()
        if rank == 0:
            tensor[-1] = read_phase(folder)
        began = time.perf_counter()
        reduce(tensor)
        took = time.perf_counter() - began
        seconds.setdefault(phase, []).append(took)
        before, phase = phase, int(tensor[-1])
        if phase != before:
            peaks[before] = max(peaks.get(before, 0), _peak_bytes())


def _peak_bytes() -> int:
    """Most resident memory since the last call."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    _forget_peak()
    return peak


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def read_phase(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((folder / "phase").read_text())
    return 0


def put(path: Path, value: object) -> None:
    """Readers see nothing, or all of it."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(value))
    new.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
