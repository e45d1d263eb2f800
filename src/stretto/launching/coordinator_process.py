"""The coordinator as a child process: its command line, its environment, and the line in which it says where it listens.

    stretto.launch, torchrun, Slurm, MPI     `start` does all of it
    stretto run, stretto lab                 their supervisors make the process; the words and the answer are these

The child gets the writing end of a pipe (`--ready-fd`) and writes "HOST:PORT\\n" there once it listens. End-of-file without
that line means that it has ended, so nobody waits longer than the child lives.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.errors import RendezvousError

SOURCE = str(Path(__file__).resolve().parents[2])


def argv(
    bind: str, world_size: int, ready_fd: int, *, encrypted: bool, parent: int | None = None, options: Sequence[str] = ()
) -> list[str]:
    """With `parent` the kernel ends the coordinator when the *thread* of that process that started it ends."""
    return [
        sys.executable, "-m", "stretto.launching.coordinator",
        "--bind", bind,
        "--world-size", str(world_size),
        "--ready-fd", str(ready_fd),
        *(["--encrypted"] if encrypted else []),
        *([] if parent is None else ["--die-with-parent", str(parent)]),
        *options,
    ]  # fmt: skip


def environment(secret: bytes, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the secret; a module in the working directory does not hide one that the coordinator needs."""
    return importing_stretto(environ) | {"STRETTO_SECRET": secret.hex(), "PYTHONSAFEPATH": "1"}


def importing_stretto(environ: Mapping[str, str]) -> dict[str, str]:
    """For helper processes of ours: they import this very stretto, whatever `sys.path` was edited to and wherever they run."""
    inherited = [os.path.abspath(each) for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return {**environ, "PYTHONPATH": os.pathsep.join([SOURCE, *inherited])}


def start(
    bind: str,
    world_size: int,
    secret: bytes,
    environ: Mapping[str, str],
    *,
    encrypted: bool,
    deadline: float,
    parent: int | None = None,
    stderr: int | None = None,
    new_session: bool = False,
    options: Sequence[str] = (),
) -> tuple[subprocess.Popen[bytes], str]:
    """A coordinator that listens, and where. `RendezvousError` if it does not by the deadline; it is gone then."""
    ready, told = os.pipe()
    try:
        process = subprocess.Popen(
            argv(bind, world_size, told, encrypted=encrypted, parent=parent, options=options),
            env=environment(secret, environ),
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[told],
            start_new_session=new_session,
        )
    finally:
        os.close(told)
    try:
        address = read_address(ready, deadline)
        if address is None:
            raise RendezvousError(_problem(process, bind))
        return process, address
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        os.close(ready)


def read_address(ready: int, deadline: float) -> str | None:
    """What the coordinator announces; None when it ended or the time was over before it could."""
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        chunk = os.read(ready, 256)
        if not chunk:
            return None
        text += chunk
    return text.decode().strip()


def _problem(process: subprocess.Popen[bytes], bind: str) -> str:
    process.kill()
    said = None if process.stderr is None else process.communicate()[1]
    if said is None:
        why = f"its own message is above (pid {process.pid}).\nRun `stretto doctor` to check this machine."
    else:
        why = said.decode(errors="replace").strip() or "it did not start in time.\nRun `stretto doctor` to check this machine."
    return f"The coordinator cannot be started at {bind}: {why}"
