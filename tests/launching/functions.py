"""What spawned workers of `stretto.launch` do in tests. They import this file, which does without torch: that takes seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from stretto.errors import PeerLost

WAIT_S = 60.0


def place(word: str) -> tuple[str, int, int, str]:
    environ = os.environ
    return word, int(environ["STRETTO_RANK"]), int(environ["WORLD_SIZE"]), environ["STRETTO_RENDEZVOUS"]


def variables(names: list[str]) -> list[str]:
    return [os.environ[name] for name in names]


def fail_on_rank_1(folder: str) -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    (Path(folder) / "waiting").write_text(str(os.getpid()))
    time.sleep(600)


def accuse_or_confess(folder: str) -> None:
    if os.environ["RANK"] == "0":
        (Path(folder) / "accused").touch()
        raise PeerLost(1, "connection closed")
    wait_for(Path(folder) / "accused")
    threading.Event().wait(0.3)  # most often rank 0 is heard first; whoever is, rank 1 must be blamed
    raise ValueError("the reason")


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def unpicklable() -> object:
    return threading.Lock()


def leave(code: int) -> None:
    sys.exit(code)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + WAIT_S
    while not path.exists() or not path.read_text() and path.suffix == ".pid":
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return path.read_text()
