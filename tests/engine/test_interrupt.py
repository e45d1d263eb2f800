"""Ctrl-C while gradients are being compressed: the thread that does it is ended before the interpreter is.

A thread that is still in torch's code when the interpreter ends takes the process down with SIGABRT. So the interrupt comes when
it is certain to be there: the codec of these scripts encodes until it has come, and for some time after it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
Start = Callable[..., "subprocess.Popen[str]"]
LIMIT_S = 100.0  # for hangs: far longer than a busy machine needs

TRAIN = """
import faulthandler, os, signal, sys, threading, time
from pathlib import Path
import torch
import stretto

folder, caught = Path(sys.argv[1]), sys.argv[2] == "caught"
torch.set_num_threads(1)
stretto.init()
rank = stretto.rank()
faulthandler.enable(open(folder / f"fault{rank}", "w"))  # has a word to say about SIGABRT
interrupted = threading.Event()
rounds = 0

def interrupt(number, frame):
    interrupted.set()
    signal.default_int_handler(number, frame)

signal.signal(signal.SIGINT, interrupt)

class Slow(stretto.Sign):
    def encode_residual(self, values, blocks, draw):
        assert threading.current_thread() is not threading.main_thread()
        if rounds == 3:
            matrix, until = torch.randn(200, 200), time.monotonic() + 100
            (folder / f"encoding{rank}").touch()
            while not interrupted.is_set() and time.monotonic() < until:
                torch.mm(matrix, matrix)
            for _ in range(100):
                torch.mm(matrix, matrix)
        return super().encode_residual(values, blocks, draw)

def main():
    global rounds
    model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = stretto.Strategy(compress=stretto.ErrorFeedback(Slow(block=64)))
    stretto.distribute(model, optimizer, strategy)
    while True:
        model(torch.randn(4, 6)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rounds += 1

try:
    main()
except KeyboardInterrupt:
    (folder / f"interrupted{rank}").write_text(str(rounds))
    if not caught:
        raise
"""
FROM_THE_LAUNCHER = "from stretto import cli; from stretto.launching import launch; launch.INTERRUPT_S = 90.0; cli.main()"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(*command before the script, caught=...) -> the process, in whose folder things are marked."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*command: str, caught: bool) -> subprocess.Popen[str]:
        path = tmp_path / "train.py"
        path.write_text(TRAIN)
        arguments = [sys.executable, *command, str(path), str(tmp_path), "caught" if caught else "raised"]
        started.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def interrupt_while_encoding(process: subprocess.Popen[str], folder: Path, num_workers: int) -> str:
    """Returns what it wrote to stderr."""
    until = time.monotonic() + LIMIT_S
    while not all((folder / f"encoding{rank}").exists() for rank in range(num_workers)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "nobody trains"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    for rank in range(num_workers):
        assert (folder / f"interrupted{rank}").read_text() == "3"
        assert (folder / f"fault{rank}").read_text() == ""
    return errors


@pytest.mark.slow
def test_ctrl_c_while_one_worker_compresses(start: Start, tmp_path: Path) -> None:
    worker = start(caught=False)
    errors = interrupt_while_encoding(worker, tmp_path, 1)
    assert worker.returncode == -signal.SIGINT, errors  # as every Python program that is interrupted: 130 in a shell
    assert errors.rstrip().endswith("KeyboardInterrupt") and "terminate" not in errors


@pytest.mark.slow
def test_ctrl_c_while_two_workers_compress_is_a_clean_stop(start: Start, tmp_path: Path) -> None:
    launcher = start("-c", FROM_THE_LAUNCHER, "run", "-n", "2", caught=True)
    errors = interrupt_while_encoding(launcher, tmp_path, 2)
    assert launcher.returncode == 130 and errors == ""
