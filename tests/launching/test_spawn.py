"""`stretto.launch`: functions in fresh processes, results by rank, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launching.functions import WAIT_S, accuse_or_confess, die, fail_on_rank_1, leave, place, unpicklable, variables, wait_for
from preloaded import Preloaded
from stretto.errors import ConfigurationError, JobError, WorkerFailed
from stretto.launching import spawn
from stretto.launching.hosts import interface_of
from stretto.launching.spawn import launch


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        assert time.monotonic() < deadline, f"{pid} lives"
        time.sleep(0.01)


@pytest.mark.parametrize("n", [1, 3])
def test_results_come_back_by_rank(n: int) -> None:
    results = launch(place, n, "word", timeout_s=WAIT_S)

    assert [result[:3] for result in results] == [("word", rank, n) for rank in range(n)]
    assert len({result[3] for result in results}) == 1  # one rendezvous
    assert "STRETTO_RANK" not in os.environ  # ours is as it was


def test_the_first_failure_is_raised_here_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        launch(fail_on_rank_1, 3, str(tmp_path), timeout_s=WAIT_S)

    assert caught.value.rank == 1 and time.monotonic() - started < WAIT_S
    assert "fail_on_rank_1" in caught.value.traceback and "ValueError: the reason" in str(caught.value)
    if (tmp_path / "waiting").exists():
        wait_until_dead(int((tmp_path / "waiting").read_text()))


def test_a_worker_that_lost_its_peer_is_not_blamed_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "ACCUSED_S", WAIT_S)  # a busy machine may need longer than it is for rank 1's words
    with pytest.raises(WorkerFailed, match="the reason") as caught:
        launch(accuse_or_confess, 2, str(tmp_path), timeout_s=WAIT_S)

    assert caught.value.rank == 1 and (tmp_path / "accused").exists()


def test_a_worker_that_dies_silently_is_a_failure() -> None:
    with pytest.raises(WorkerFailed, match="killed by SIGKILL") as caught:
        launch(die, 1, int(signal.SIGKILL), timeout_s=WAIT_S)

    assert caught.value.rank == 0 and caught.value.traceback == ""


def test_a_function_finds_torchs_variables_and_the_encryption_the_user_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("STRETTO_ENCRYPT", "on")
    names = ["GLOO_SOCKET_IFNAME", "STRETTO_ENCRYPT"]
    assert launch(variables, 1, names, timeout_s=WAIT_S) == [[interface_of("127.0.0.1"), "on"]]


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigurationError, match="positive number of seconds"):
        launch(place, 1, "word", timeout_s=timeout_s)


def test_at_the_deadline_all_are_killed_and_named() -> None:
    with pytest.raises(JobError, match=r"timeout_s=0.5 seconds: rank 0, 1"):
        launch(time.sleep, 2, 600, timeout_s=0.5)


def test_sys_exit_is_success_or_failure_by_its_code() -> None:
    assert launch(leave, 1, 0, timeout_s=WAIT_S) == [None]
    with pytest.raises(WorkerFailed, match=r"sys\.exit\(3\)"):
        launch(leave, 1, 3, timeout_s=WAIT_S)


def test_what_cannot_travel_is_an_error_that_says_so() -> None:
    with pytest.raises(WorkerFailed, match="a lock, cannot be sent back"):
        launch(unpicklable, 1, timeout_s=WAIT_S)
    with pytest.raises(ConfigurationError, match="top level of a module"):
        launch(lambda: 1, 1)


def test_a_closure_can_be_forked() -> None:
    base = 40

    def add(number: int) -> int:
        return base + number + int(os.environ["RANK"])

    assert launch(add, 2, 2, timeout_s=WAIT_S, start_method="fork") == [42, 43]


def test_a_forked_worker_can_launch_workers_of_its_own() -> None:
    def inner() -> int:
        return 10 * int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"])

    def outer() -> list[int]:
        return launch(inner, 2, timeout_s=WAIT_S, start_method="fork")

    assert launch(outer, 1, timeout_s=WAIT_S, start_method="fork") == [[20, 21]]


@pytest.mark.parametrize("n", [0, -1, True, "2"])
def test_a_number_of_workers_that_cannot_work_is_refused(n: int) -> None:
    with pytest.raises(ConfigurationError, match="number of workers"):
        launch(place, n)


INTERACTIVE = """
import os, subprocess, sys
from stretto.launching.spawn import launch
def who(folder):
    rank = os.environ["RANK"]
    if folder:
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        for name, pid in (("child", child.pid), ("worker", os.getpid())):
            with open(f"{folder}/{name}{rank}.pid", "w") as file: file.write(str(pid))
        child.wait()
    return int(rank)
print(launch(who, 2, sys.argv[1]))
"""


def test_a_function_typed_into_a_session_works() -> None:
    done = subprocess.run([sys.executable, "-c", INTERACTIVE, ""], capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert done.stdout == "[0, 1]\n" and done.stderr == ""


def test_a_killed_program_leaves_no_worker_and_no_child_of_one_behind(tmp_path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", INTERACTIVE, str(tmp_path)])
    names = [f"{kind}{rank}.pid" for kind in ("worker", "child") for rank in range(2)]
    everybody = [int(wait_for(tmp_path / name)) for name in names]
    program.kill()
    program.wait(WAIT_S)

    for pid in everybody:
        wait_until_dead(pid)


# Cells of a notebook: their functions are in `__main__`, and no file stands behind them.
KERNEL = '''
import torch
import stretto
from stretto.launching.spawn import launch
from torch.utils.checkpoint import checkpoint

CELLS = """
def train(steps):
    torch.manual_seed(stretto.rank())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stretto.distribute(model, optimizer)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return stretto.rank(), stretto.world_size(), model.weight.tolist()

def work(steps):
    stretto.init()
    return train(steps)

def nest(x, depth):
    return x * x if depth == 0 else checkpoint(nest, x, depth - 1, use_reentrant=True)
"""
exec(compile(CELLS, "<cell 1>", "exec"))

def show(results):
    print([result[:2] for result in results], results[0][2] == results[1][2])

show(launch(work, 2, 2))
stretto.init()
print(train(2)[:2])
show(launch(work, 2, 2))  # after a job of one has trained in the kernel
print(stretto.rank(), stretto.world_size())
stretto.shutdown()
show(launch(work, 2, 2))

nest(torch.ones(3, requires_grad=True), 80).sum().backward()  # so deep that autograd starts threads
try:
    launch(work, 2, 2)
except stretto.WorkerFailed as failed:
    print(failed)
'''


@pytest.mark.processes
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch for CUDA runs no backward in a fork once its parent has")
def test_a_kernel_that_has_trained_itself_launches_workers_that_begin_anew(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = preloaded.run(tmp_path / "kernel.py", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    two = "[(0, 2), (1, 2)] True"
    assert done.stdout.splitlines()[:5] == [two, "(0, 1)", two, "0 1", two]
    failed = done.stdout.split("\n", 5)[5]
    assert "fork-based multiprocessing" in failed and "%%writefile" in failed and "restart" in failed
