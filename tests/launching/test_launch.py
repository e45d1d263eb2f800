"""`stretto run` seen from outside: real processes, small scripts without torch, every wait with a deadline.

The deadlines are for hangs: far longer than a busy machine needs, far shorter than what would go on for ever (`FOR_EVER_S`).
Where the launcher's own patience decides what is seen, a test sets it (`patience`), so that no outcome depends on who is quicker.
"""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stretto.errors import ConfigurationError
from stretto.lab.environment import SharedByHosts
from stretto.lab.messages import Command
from stretto.launching import hosts, launch, launch_plan
from stretto.launching.launch_report import Failure, Lost, culprit, failure_block, last_words, lost_block, what_it_does

Start = Callable[..., "subprocess.Popen[str]"]

LIMIT_S = 60.0
FOR_EVER_S = 600
pytestmark = pytest.mark.timeout(240)

# What the scripts below share: `mark` tells the test and other ranks that a point was reached, `wait_for` waits for it.
HELPERS = """
import os, signal, subprocess, sys, time
rank, world_size = int(os.environ["STRETTO_RANK"]), int(os.environ["STRETTO_WORLD_SIZE"])
folder = sys.argv[1]
def mark(name, text=""):
    with open(f"{folder}/{name}.new", "w") as file: file.write(str(text))
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")
def wait_for(name, seconds=60):
    end = time.monotonic() + seconds
    while not os.path.exists(f"{folder}/{name}"):
        if time.monotonic() > end: sys.exit(f"no {name}")
        time.sleep(0.01)
def have_children():
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    mark(f"child{rank}.pid", subprocess.Popen(sleeper, stderr=subprocess.DEVNULL).pid)
    mark(f"daemon{rank}.pid", subprocess.Popen(sleeper, start_new_session=True).pid)
    mark(f"worker{rank}.pid", os.getpid())
def wait_for_state(pid, states):
    while True:  # until the process is in one of these states of /proc; "" is none: it is gone
        try:
            with open(f"/proc/{pid}/stat") as file: state = file.read().rpartition(")")[2].split()[0]
        except OSError: state = ""
        if state in states: return
        time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(script, *options, args=(), patience={}) -> the launcher, running `script` with the folder as its first argument."""
    started: list[subprocess.Popen[str]] = []

    def start_one(
        script: str, *options: str, args: tuple[str, ...] = (), patience: dict[str, float] | None = None, **more: object
    ) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(HELPERS + textwrap.dedent(script))
        command = [*launcher_command(patience or {}), "run", *options, str(path), str(tmp_path), *args]
        settings: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
        launcher: subprocess.Popen[str] = subprocess.Popen(command, **settings)  # type: ignore[call-overload]
        started.append(launcher)
        return launcher

    yield start_one
    for launcher in started:
        launcher.kill()
        for stream in (launcher.stdin, launcher.stdout, launcher.stderr):
            if stream is not None:
                stream.close()
        launcher.wait(LIMIT_S)


def launcher_command(patience: dict[str, float]) -> list[str]:
    """`stretto`, or the same with other values for how long the launcher waits for what."""
    if not patience:
        return [sys.executable, "-m", "stretto"]
    values = "; ".join(f"launch.{name} = {seconds}" for name, seconds in patience.items())
    assert all(hasattr(launch, name) for name in patience)
    return [sys.executable, "-c", f"from stretto import cli; from stretto.launching import launch; {values}; cli.main()"]


def wait_until(what: str, condition: Callable[[], bool], seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)


def pids(folder: Path, num_workers: int) -> list[int]:
    """Of every worker, its child and its child in another session, once all of them run."""
    files = [folder / f"{kind}{rank}.pid" for kind in ("worker", "child", "daemon") for rank in range(num_workers)]
    wait_until("all workers and their children run", lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def wait_until_dead(some: list[int]) -> None:
    wait_until("no process is left", lambda: not any(map(is_alive, some)))


# Output.


def test_every_line_has_its_rank_in_front_and_none_is_torn(start: Start) -> None:
    launcher = start(
        """
        for number in range(3000): print(f"rank {rank} line {number} " + "x" * (number % 300))
        print(f"error of {rank}", file=sys.stderr)
        """,
        "-n",
        "3",
    )
    output, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 0
    matches = [re.fullmatch(r"\[(\d)\] rank (\d) line (\d+) x*", line) for line in output.splitlines()]
    found = [tuple(map(int, match.groups())) for match in matches if match]
    assert len(found) == len(matches) == 9000
    assert all(prefix == rank for prefix, rank, _ in found)
    for wanted in range(3):
        assert [number for _, rank, number in found if rank == wanted] == list(range(3000))
    assert sorted(errors.splitlines()) == [f"[{rank}] error of {rank}" for rank in range(3)]


def test_no_prefix_leaves_lines_as_they_are(start: Start) -> None:
    launcher = start("print('bare')", "-n", "2", "--no-prefix")

    assert launcher.communicate(timeout=LIMIT_S)[0] == "bare\nbare\n"


def test_a_terminal_gets_colours_and_a_status_line_and_a_pipe_gets_neither(start: Start, tmp_path: Path) -> None:
    script = "print('hello'); mark(f'here{rank}'); wait_for('go')"
    environ = {**os.environ, "TERM": "xterm"}
    environ.pop("NO_COLOR", None)
    leader, follower = pty.openpty()
    launcher = start(script, "-n", "2", stdout=follower, stderr=follower, env=environ)
    os.close(follower)
    shown = read_terminal(leader, until=b"2 of 2 workers alive")
    (tmp_path / "go").touch()
    shown += read_terminal(leader, until=None)
    os.close(leader)

    assert launcher.wait(LIMIT_S) == 0
    assert b"\x1b[36m[0]\x1b[0m hello" in shown and b"\x1b[33m[1]\x1b[0m hello" in shown
    assert b"2 of 2 workers alive" in shown

    output, errors = start(script, "-n", "2", env=environ).communicate(timeout=LIMIT_S)
    assert sorted(output.splitlines()) == ["[0] hello", "[1] hello"] and errors == ""


def read_terminal(descriptor: int, until: bytes | None) -> bytes:
    data = b""
    while until is None or until not in data:
        try:
            chunk = os.read(descriptor, 4096)
        except OSError:  # Linux: the other side has been closed
            break
        if not chunk:
            break
        data += chunk
    return data


def test_the_first_worker_has_our_stdin_and_the_others_have_none(start: Start) -> None:
    launcher = start("print(repr(sys.stdin.read()))", "-n", "2", stdin=subprocess.PIPE)

    output, _ = launcher.communicate("some text", timeout=LIMIT_S)
    assert sorted(output.splitlines()) == ["[0] 'some text'", "[1] ''"]


def test_a_reader_that_goes_away_ends_the_job(start: Start, tmp_path: Path) -> None:
    launcher = start("have_children()\nwhile True: print('y' * 100)", "-n", "2")
    everybody = pids(tmp_path, 2)
    assert launcher.stdout is not None
    launcher.stdout.close()

    assert launcher.wait(LIMIT_S) == 128 + signal.SIGPIPE
    wait_until_dead(everybody)


@pytest.mark.parametrize(("options", "code"), [([], 0), (["fails"], 5)])
def test_a_full_disk_under_the_log_does_not_end_the_job(start: Start, options: tuple[str, ...], code: int) -> None:
    with open("/dev/full", "w") as full:
        launcher = start("print('x' * 100); sys.exit(5 if 'fails' in sys.argv else 0)", args=tuple(options), stdout=full)
        _, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == code
    assert "stretto: standard output cannot be written (No space left on device); the job goes on" in errors


def test_a_reader_that_pauses_does_not_hide_a_failure(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        have_children()
        if rank == 0:
            for _ in range(4000): print("y" * 1000)  # far more than the pipe to the test holds
            mark("flooded")
            while True: print("y" * 1000)
        wait_for("flooded")
        sys.exit(4)
        """,
        "-n",
        "2",
    )
    everybody = pids(tmp_path, 2)
    wait_until("output piles up", (tmp_path / "flooded").exists)

    wait_until_dead(everybody)  # although nobody has read a byte
    launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 4


def test_a_reader_that_pauses_for_ever_does_not_make_the_launcher_unstoppable(start: Start, tmp_path: Path) -> None:
    launcher = start("mark('worker0.pid', os.getpid()); print('y\\n' * 500_000)")
    wait_until("the worker runs", (tmp_path / "worker0.pid").exists)
    wait_until_dead([int((tmp_path / "worker0.pid").read_text())])
    assert launcher.poll() is None  # it still has output that nobody reads
    launcher.send_signal(signal.SIGINT)

    assert launcher.wait(LIMIT_S) == 130


# Failure.


@pytest.mark.alone
def test_a_failing_worker_ends_all_and_its_traceback_comes_last(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        if rank != 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stubborn: only SIGKILL ends these
        have_children()
        for other in range(world_size): wait_for(f"worker{other}.pid")
        if rank == 1:
            mark("failed")
            raise ValueError("the reason")
        time.sleep(600)
        """,
        "-n",
        "3",
    )
    everybody = pids(tmp_path, 3)
    wait_until("rank 1 fails", (tmp_path / "failed").exists)
    wait_until_dead(everybody)
    _, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 1
    headline = errors.index("stretto: rank 1 of 3 failed first")
    assert "exited with code 1" in errors[headline:] and "2 other workers were stopped" in errors[headline:]
    assert errors[headline:].count("Traceback (most recent call last):") == 1
    assert errors.endswith("ValueError: the reason\n\n")


def test_a_killed_worker_ends_all_with_their_children(start: Start, tmp_path: Path) -> None:
    launcher = start("have_children()\ntime.sleep(600)", "-n", "3")
    everybody = pids(tmp_path, 3)
    os.kill(int((tmp_path / "worker2.pid").read_text()), signal.SIGKILL)

    wait_until_dead(everybody)
    _, errors = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "stretto: rank 2 of 3 failed first" in errors and "was killed by SIGKILL" in errors


def test_a_killed_launcher_leaves_nobody_behind(start: Start, tmp_path: Path) -> None:
    launcher = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nhave_children()\ntime.sleep(600)", "-n", "2")
    everybody = pids(tmp_path, 2)
    launcher.kill()

    wait_until_dead(everybody)


def test_a_killed_supervisor_takes_the_workers_and_their_children_along(start: Start, tmp_path: Path) -> None:
    launcher = start("mark(f'parent{rank}', os.getppid()); have_children(); time.sleep(600)", "-n", "2")
    everybody = pids(tmp_path, 2)
    supervisor = int((tmp_path / "parent0").read_text())
    assert supervisor != launcher.pid
    os.kill(supervisor, signal.SIGKILL)

    wait_until_dead(everybody)
    _, errors = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 2 and f"pid {supervisor}" in errors


def test_the_exit_code_is_that_of_the_first_failure(start: Start) -> None:
    launcher = start(
        """
        if rank == 1: sys.exit(7)
        wait_for("never", seconds=600)
        """,
        "-n",
        "2",
    )
    _, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 7 and "rank 1 of 2 failed first" in errors and "wrote nothing to stderr" in errors


def test_a_worker_that_lost_its_peer_is_not_blamed_for_it(start: Start) -> None:
    launcher = start(
        """
        from stretto.errors import PeerLost
        if rank == 0:
            mark("pid", os.getpid())
            raise PeerLost(1, "connection closed")
        wait_for("pid")
        first = int(open(f"{folder}/pid").read())
        while os.path.exists(f"/proc/{first}"): time.sleep(0.01)  # rank 0 has ended first, for certain
        raise ValueError("the reason")
        """,
        "-n",
        "2",
        patience={"LAST_WORDS_S": FOR_EVER_S},  # however late rank 1 is: it is what it says that counts
    )
    _, errors = launcher.communicate(timeout=LIMIT_S)

    assert "stretto: rank 1 of 2 failed first" in errors
    assert errors.endswith("ValueError: the reason\n\n")


ACCUSE = """
    import stretto.errors
    from stretto.errors import FrameError, PeerLost, WireTimeout
    mark(f"worker{rank}.pid", os.getpid())
    if rank == 1:
        print("about to be silent", file=sys.stderr)
        SILENCE
    wait_for("silent")
    wait_for_state(int(open(f"{folder}/worker1.pid").read()), STATES)
    mark(f"accuses{rank}")
    wait_for(f"accuses{2 - rank}")
    raise ERROR
"""


@pytest.mark.parametrize(
    ("silence", "states", "doing", "error", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "T", "stopped (T)", "PeerLost(1, 'no heartbeat')", "rank 1 is lost"),
        ("time.sleep(600)", "S", "sleeping (S)", "WireTimeout(1, 'all_reduce 7', 5.0)", "rank 1 did not take part"),
        ("exec('while True: pass')", "R", "running (R)", "FrameError(1, 'garbage')", "rank 1 sent a bad frame: garbage"),
        ("os._exit(0)", ("Z", ""), "it exited with code 0", "PeerLost(1, 'connection closed')", "connection closed"),
    ],
)  # fmt: skip
def test_a_worker_that_all_others_name_is_said_to_be_lost_and_not_its_victims(
    start: Start, tmp_path: Path, silence: str, states: str | tuple[str, ...], doing: str, error: str, message: str
) -> None:
    script = ACCUSE.replace("SILENCE", f"mark('silent'); {silence}").replace("STATES", repr(states)).replace("ERROR", error)
    launcher = start(script, "-n", "3")
    _, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 1  # of the first that named it
    headline = re.search(r"stretto: rank 1 of 3 was lost to the others: named by (ranks 0 and 2|rank [02])\n", errors)
    assert headline is not None, errors
    said = errors[headline.start() :]
    lost = int((tmp_path / "worker1.pid").read_text())
    assert f"pid {lost}" in said and doing in said, errors
    assert message in said and "failed first" not in errors
    assert errors.endswith("The last words of rank 1 itself:\n\nabout to be silent\n\n")
    wait_until_dead([lost])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.alone
def test_a_stopped_worker_of_a_real_job_is_the_one_that_is_named(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        import torch, stretto
        stretto.init()
        mark(f"worker{rank}.pid", os.getpid())
        for _ in range(10**9):
            stretto.all_reduce(torch.ones(1000))
            mark(f"trains{rank}")
        """,
        "-n",
        "3",
        "--timeout",
        "2",
    )
    wait_until("all train", lambda: all((tmp_path / f"trains{rank}").exists() for rank in range(3)))
    stopped = int((tmp_path / "worker1.pid").read_text())
    os.kill(stopped, signal.SIGSTOP)
    _, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 1
    named = re.search(r"stretto: rank 1 of 3 was lost to the others: named by (rank [02]|ranks 0 and 2)\n", errors)
    assert named is not None, errors
    assert f"Its process (pid {stopped}) was stopped (T)" in errors
    wait_until_dead([stopped])


def failure(rank: int, words: str, code: int = 1) -> Failure:
    return Failure(rank=rank, pid=100 + rank, code=code, after_s=1.0, stderr_tail=words.encode())


def test_who_is_blamed_follows_from_who_accuses_whom() -> None:
    own = failure(2, "ValueError: the reason")
    of_2 = failure(1, "stretto.errors.PeerLost: rank 2 is lost: x")
    of_1 = failure(
        0, "Traceback (most recent call last):\nstretto.errors.WireTimeout: rank 1 did not take part in all_reduce 3 ..."
    )
    of_3 = failure(4, "stretto.errors.BackwardFailed: backward ended in an exception on ranks 3, 5, so ...")

    assert culprit([of_1, of_2, own], 8) is own
    assert culprit([of_1, of_2], 8) == Lost(2, (of_2,))  # rank 1 was named, but it failed because of rank 2
    assert culprit([of_1, of_3], 8) is of_1  # two suspects: the first to end is shown
    assert culprit([of_3], 8) == Lost(3, (of_3,))
    of_server = failure(0, "stretto.errors.PeerLost: rank 8 is lost: it was a server, and the last with a copy of 'weight'.")
    assert culprit([of_server], 8) is of_server  # which is no worker of any node
    both = Lost(7, (failure(0, "PeerLost: rank 7 is lost: x", code=3), failure(1, "PeerLost: rank 7 is lost: y")))
    assert both.exit_code == 3
    shown = lost_block(both, 8, 0, "It is a worker of node 3.", b"")
    assert "rank 7 of 8 was lost to the others: named by ranks 0 and 1\nIt is a worker of node 3." in shown
    assert shown.endswith("PeerLost: rank 7 is lost: x\n")


def test_a_chained_accusation_counts_and_the_last_one_decides() -> None:
    chained = (
        "Traceback (most recent call last):\nstretto.errors.PeerLost: rank 5 is lost: x\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\nstretto.errors.PeerLost: rank 6 is lost: y\n"
    )

    assert failure(0, chained).accused == 6
    assert failure(0, "the log mentions PeerLost: rank 5 is lost: x").accused is None


def test_the_state_of_a_process_is_what_the_kernel_says() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(signal.SIGSTOP)
        wait_until("it is stopped", lambda: what_it_does(child.pid).startswith("stopped (T)"))
    finally:
        child.kill()
    wait_until("it is a zombie", lambda: what_it_does(child.pid) == "gone")
    child.wait()
    assert what_it_does(child.pid) == "gone"
    assert what_it_does(os.getpid()).startswith("running")


def test_last_words_are_the_last_traceback_with_what_caused_it() -> None:
    chain = (
        'Traceback (most recent call last):\n  File "a"\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "b"\nValueError: 2'
    )
    earlier = "Traceback (most recent call last):\nOSError: handled\nall is well\n"

    assert last_words((earlier + chain + "\n").encode()) == chain
    assert last_words(b"one\ntwo \xff") == "one\ntwo \ufffd"
    assert last_words(b"") == ""


def test_a_failure_by_signal_is_named() -> None:
    crash = failure(0, "", code=-signal.SIGSEGV)

    assert crash.exit_code == 139 and culprit([crash], 8) is crash
    assert "was killed by SIGSEGV" in failure_block(crash, 1, 0)


# Stopping.


def test_ctrl_c_is_a_clean_stop_and_no_reason_to_start_again(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        have_children()
        try:
            mark(f"ready{rank}"); time.sleep(600)
        except KeyboardInterrupt:
            mark(f"clean{rank}")
        """,
        "-n",
        "2",
        "--max-restarts",
        "3",
        patience={"INTERRUPT_S": FOR_EVER_S},  # they leave by themselves, however long that takes
    )
    everybody = pids(tmp_path, 2)
    wait_until("both are ready", lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 130 and errors == ""
    assert (tmp_path / "clean0").exists() and (tmp_path / "clean1").exists()
    wait_until_dead(everybody)


@pytest.mark.alone
def test_a_second_ctrl_c_kills(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        signal.signal(signal.SIGINT, lambda *_: mark(f"heard{rank}"))
        have_children()
        while True: time.sleep(1)
        """,
        "-n",
        "2",
        patience={"INTERRUPT_S": FOR_EVER_S},  # so it is not the end of the grace after the first that ends them
    )
    everybody = pids(tmp_path, 2)
    launcher.send_signal(signal.SIGINT)
    wait_until("both heard the first", lambda: all((tmp_path / f"heard{rank}").exists() for rank in range(2)))
    launcher.send_signal(signal.SIGINT)

    assert launcher.wait(LIMIT_S) == 130
    wait_until_dead(everybody)


def test_sigterm_to_the_launcher_ends_the_workers_for_good(start: Start, tmp_path: Path) -> None:
    launcher = start("have_children()\ntime.sleep(600)", "-n", "2", "--max-restarts", "3", patience={"RESTART_S": 0.01})
    everybody = pids(tmp_path, 2)
    launcher.terminate()
    _, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 128 + signal.SIGTERM and "restart" not in errors
    wait_until_dead(everybody)


# What a worker is told.


def test_workers_get_the_environment_of_the_contract(start: Start) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    wanted = [*names, *(f"STRETTO_{name}" for name in names), "STRETTO_RENDEZVOUS", "STRETTO_SECRET", "STRETTO_ENCRYPT"]
    wanted += ["MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "STRETTO_TIMEOUT", "GLOO_SOCKET_IFNAME"]
    wanted += ["STRETTO_MEET_TIMEOUT", "STRETTO_STRATEGY", "STRETTO_RESTART_COUNT"]
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    options = ["--timeout", "9", "--meet-timeout", "900", "--strategy", "power_sgd(rank=2)"]
    launcher = start(f"print(*[os.environ[name] for name in {wanted}])", "-n", "2", *options, env=environ)
    output, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 0, errors
    for rank, line in enumerate(sorted(output.splitlines())):
        values = dict(zip(wanted, line.removeprefix(f"[{rank}] ").split(), strict=True))
        assert [values[name] for name in names] == [str(rank), "2", str(rank), "2"]
        assert [values[f"STRETTO_{name}"] for name in names] == [str(rank), "2", str(rank), "2"]
        assert re.fullmatch(r"127\.0\.0\.1:\d+", values["STRETTO_RENDEZVOUS"])
        assert re.fullmatch(r"[0-9a-f]{64}", values["STRETTO_SECRET"])
        assert values["STRETTO_ENCRYPT"] == "off" and values["STRETTO_TIMEOUT"] == "9"
        assert values["MASTER_ADDR"] == "127.0.0.1" and values["OMP_NUM_THREADS"] == str(launch_plan.threads_each(2))
        assert [values[name] for name in wanted[-3:]] == ["900", "power_sgd(rank=2)", "0"]
        assert values["MASTER_PORT"] != values["STRETTO_RENDEZVOUS"].rpartition(":")[2]
        assert values["GLOO_SOCKET_IFNAME"] == hosts.interface_of("127.0.0.1")


def test_what_the_user_has_set_for_torch_is_kept(start: Start) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "mine"}
    script = "print(os.environ['OMP_NUM_THREADS'], os.environ['GLOO_SOCKET_IFNAME'])"
    launcher = start(script, "-n", "2", "--no-prefix", env=environ)

    assert launcher.communicate(timeout=LIMIT_S)[0] == "3 mine\n3 mine\n"


@pytest.mark.parametrize(("processors", "workers", "threads"), [(64, 8, 8), (7, 2, 3), (2, 4, 1), (1, 2, 1)])
def test_workers_share_the_processors_out_among_them(
    monkeypatch: pytest.MonkeyPatch, processors: int, workers: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))

    assert launch_plan.torch_defaults(workers, None) == {"OMP_NUM_THREADS": str(threads)}
    assert launch_plan.torch_defaults(1, None) == {}  # torch's own choice is right for one


def test_between_machines_gloo_gets_the_interface_that_leads_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "interfaces", lambda: [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth1", "10.1.0.5")])
    monkeypatch.setattr(hosts, "route_towards", lambda host, port: "10.1.0.5")

    assert launch_plan.gloo_interface(("node0", 29400), {}) == "eth1"
    assert launch_plan.gloo_interface(("node0", 29400), {"STRETTO_INTERFACE": "10.0.0.5"}) == "eth0"
    assert launch_plan.gloo_interface(None, {}) == "lo"
    monkeypatch.setattr(hosts, "route_towards", lambda host, port: "127.0.0.1")
    assert launch_plan.gloo_interface(("node0", 29400), {}) is None  # either of two might be meant: gloo shall look for itself


@pytest.mark.parametrize(("option", "variable", "expected"), [("--encrypt", "off", "on"), ("--no-encrypt", "on", "off")])
def test_encryption_is_as_the_user_says_and_workers_and_coordinator_agree(
    start: Start, option: str, variable: str, expected: str
) -> None:
    environ = os.environ | {"STRETTO_ENCRYPT": variable}
    launcher = start(MEET + "    print(os.environ['STRETTO_ENCRYPT'])", "-n", "2", "--no-prefix", option, env=environ)
    output, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 0, errors
    assert sorted(output.splitlines()) == ["met [0, 1]"] * 2 + [expected] * 2


def test_no_secret_is_shown_by_the_repr_of_what_holds_it() -> None:
    plan = launch_plan.RunPlan(command=("x.py",), workers_of=(1,), secret=b"\x5a" * 32)
    run = SharedByHosts(world_size=2, workers=1, rendezvous=None, secret="5a" * 32, encrypt=False, master_port=1)
    command = Command(argv=[b"python"], environment={"STRETTO_SECRET": b"5a" * 32}, directory=b"/")

    for shown in map(repr, (plan, run, command)):
        assert "5a5a" not in shown and "ZZZZ" not in shown, shown


@pytest.mark.parametrize(
    ("nodes", "option", "variable", "expected"),
    [
        (1, None, None, False),
        (1, None, "on", True),
        (1, True, None, True),
        (2, None, None, True),
        (2, None, "off", False),
        (2, False, "on", False),
    ],
)
def test_the_command_line_decides_on_encryption_then_the_variable_then_the_number_of_machines(
    nodes: int, option: bool | None, variable: str | None, expected: bool
) -> None:
    plan = launch_plan.RunPlan(command=("x.py",), workers_of=(1,) * nodes, secret=bytes(32), encrypt=option)

    assert launch_plan.encrypted(plan, {} if variable is None else {"STRETTO_ENCRYPT": variable}) == expected
    with pytest.raises(ConfigurationError, match="STRETTO_ENCRYPT='maybe'"):
        launch_plan.encrypted(dataclasses.replace(plan, encrypt=None), {"STRETTO_ENCRYPT": "maybe"})


def test_arguments_reach_the_script_untouched(start: Start) -> None:
    arguments = ("-n", "5", "--timeout=x", "--", "--help", "", "ä b")
    launcher = start("print(sys.argv[2:])", "--no-prefix", args=arguments)

    assert launcher.communicate(timeout=LIMIT_S)[0] == f"{list(arguments)}\n"


def test_a_module_is_run_with_m(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import sys; print(__name__, sys.argv[1:])")
    command = [sys.executable, "-m", "stretto", "run", "-n", "2", "-m", "shop", "-m", "--nodes"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True, env=environ)

    assert sorted(done.stdout.splitlines()) == [f"[{rank}] __main__ ['-m', '--nodes']" for rank in range(2)]


# Several nodes.


def test_two_nodes_form_one_job(start: Start, tmp_path: Path) -> None:
    secret = tmp_path / "job.secret"
    secret.write_text("5" * 64)
    secret.chmod(0o600)
    meeting = f"127.0.0.1:{launch_plan.free_port()}"
    script = """
        names = ("STRETTO_LOCAL_RANK", "STRETTO_RENDEZVOUS", "STRETTO_ENCRYPT", "STRETTO_SECRET", "MASTER_PORT")
        print(rank, world_size, *[os.environ[name] for name in names])
    """
    options = ["-n", "2", "--nodes", "2", "--rendezvous", meeting, "--secret-file", str(secret), "--no-prefix"]
    launchers = [start(script, *options, "--node", str(node)) for node in range(2)]
    outputs = [launcher.communicate(timeout=LIMIT_S) for launcher in launchers]

    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    port = int(meeting.rpartition(":")[2]) + 1
    for node in range(2):
        assert sorted(outputs[node][0].splitlines()) == [
            f"{2 * node + local} 4 {local} {meeting} on {'5' * 64} {port}" for local in range(2)
        ]


MEET = """
    import socket
    from stretto.launching.detect import detect
    from stretto.launching.introduce import farewell, introduce
    from stretto.launching.rendezvous import local_address
    from stretto.timeouts import Timeouts
    launch = detect(os.environ)
    listener = socket.create_server((local_address(launch)[0], 0))
    table = introduce(launch, "%s:%d" % listener.getsockname()[:2], Timeouts.of(60))
    print("met", sorted(peer.rank for peer in table.peers))
    farewell(launch)
"""


def test_workers_meet_through_the_coordinator_the_launcher_started(start: Start) -> None:
    launcher = start(MEET, "-n", "2", "--no-prefix")
    output, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 0, errors
    assert output == "met [0, 1]\n" * 2


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    secret = tmp_path / "job.secret"
    secret.write_text("6" * 64)
    secret.chmod(0o600)
    return secret


def test_a_worker_that_ends_without_calling_init_is_not_waited_for(start: Start, secret_file: Path) -> None:
    """On one machine, where the launcher notices that others still run, and on another than the coordinator's."""
    leaves = """
        mark(f"{sys.argv[2]}{rank}")
        if rank == 1:
            wait_for(f"{sys.argv[2]}0")  # so the coordinator listens
            sys.exit(0)
    """
    script = textwrap.dedent(leaves) + textwrap.dedent(MEET).replace("Timeouts.of(60)", f"Timeouts(meet_s={FOR_EVER_S})")
    environ = {**os.environ, "STRETTO_INTERFACE": "lo"}
    meeting = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{launch_plan.free_port()}", "--secret-file", str(secret_file)]
    alone = start(script, "-n", "3", "--no-prefix", args=("alone",))
    node_0, node_1 = (start(script, *meeting, "--node", node, env=environ, args=("of_two",)) for node in ("0", "1"))
    errors = [launcher.communicate(timeout=LIMIT_S)[1] for launcher in (alone, node_0, node_1)]

    assert [launcher.returncode for launcher in (alone, node_0, node_1)] == [1, 1, 0], errors
    for size, said in ((3, errors[0]), (2, errors[1])):
        assert f"stretto: rank 1 of {size} was lost to the others" in said
        assert re.search(rf"JobError: Rank 1 of {size} \(pid \d+ on host .*\) exited with code 0 without having called", said), (
            said
        )
    assert "had ended by then: it exited with code 0" in errors[0]


def test_nodes_meet_where_the_name_of_node_0_means_a_loopback_address_on_its_own_machine(start: Start, secret_file: Path) -> None:
    """As on Debian. Node 1, which is the same machine here, knows node 0 by another address."""
    port = launch_plan.free_port()
    # The nodes are one machine here: a loopback address is not published to "other machines" unless asked for.
    environ = {**os.environ, "STRETTO_INTERFACE": "lo"}
    options = ["-n", "2", "--nodes", "2", "--no-prefix", "--secret-file", str(secret_file)]
    node_1 = start(MEET, *options, "--node", "1", "--rendezvous", f"127.0.1.1:{port}", env=environ)
    node_0 = start(MEET, *options, "--node", "0", "--rendezvous", f"localhost:{port}", env=environ)
    outputs = [launcher.communicate(timeout=LIMIT_S) for launcher in (node_0, node_1)]

    assert [node_0.returncode, node_1.returncode] == [0, 0], outputs
    assert all(output == "met [0, 1, 2, 3]\n" * 2 for output, _ in outputs)
    said = "localhost means 127.0.0.1, which no other machine can reach; node 0 listens on all of its addresses"
    assert said in outputs[0][1] and "its workers publish 127.0.0.1 (lo;" in outputs[0][1]


def test_where_node_0_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(host: str, nodes: int = 2) -> str:
        plan = launch_plan.RunPlan(command=("x",), workers_of=(1,) * nodes, rendezvous=(host, 0), secret=bytes(32))
        return launch_plan.bind_address(plan)[0]

    assert bind("localhost") == "0.0.0.0"
    assert bind("localhost", nodes=1) == bind("127.0.0.1") == "127.0.0.1"  # an address is meant as it stands
    monkeypatch.setattr(hosts, "resolve", lambda host, port: (socket.AF_INET6, "::1"))
    assert bind("node0") == "::"


# Restarts.


RESTARTED = """
    attempt = int(os.environ["STRETTO_RESTART_COUNT"])
    print(rank, "attempt", attempt, os.environ["STRETTO_RENDEZVOUS"])
    if rank == 1 and attempt < 2: sys.exit(7)
    if attempt < 2: wait_for("never", seconds=600)
"""


@pytest.mark.parametrize(("restarts", "code"), [(2, 0), (1, 7)])
def test_a_failed_job_is_started_again_as_often_as_asked(start: Start, restarts: int, code: int) -> None:
    quick = {"RESTART_S": 0.01, "LAST_WORDS_S": 0.01}
    launcher = start(RESTARTED, "-n", "2", "--no-prefix", "--max-restarts", str(restarts), patience=quick)
    output, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == code, errors
    lines = [line.split() for line in output.splitlines()]
    assert {(rank, attempt) for rank, _, attempt, _ in lines} >= {("1", str(attempt)) for attempt in range(restarts + 1)}
    assert len({rendezvous for *_, rendezvous in lines}) == restarts + 1  # another coordinator each time
    assert errors.count("stretto: rank 1 of 2 failed first") == min(restarts + 1, 2)
    assert re.findall(r"started again in \S+ s \(restart (\d) of (\d)\)", errors) == [
        (str(number), str(restarts)) for number in range(1, restarts + 1)
    ]


def test_the_pause_before_a_restart_can_be_interrupted(start: Start) -> None:
    launcher = start("sys.exit(3)", "--max-restarts", "3", patience={"RESTART_S": FOR_EVER_S, "LONGEST_RESTART_S": FOR_EVER_S})
    assert launcher.stderr is not None
    while "started again in 600 s" not in launcher.stderr.readline():
        pass
    launcher.send_signal(signal.SIGINT)

    assert launcher.wait(LIMIT_S) == 130
    assert [launch.restart_pause(attempt) for attempt in (0, 1, 2, 3, 4, 5, 5000)] == [1, 2, 4, 8, 16, 30, 30]


# Node 1 fails, is started again, and comes back to a rendezvous where the first attempt has not ended yet: node 0's worker learns
# of the loss only once the restarted one has been told to wait.
MEET_AGAIN = """
    import socket
    from stretto.errors import PeerLost
    from stretto.launching import introduce as introducing
    from stretto.launching.detect import detect
    from stretto.launching.rendezvous import local_address
    from stretto.timeouts import Timeouts
    attempt = int(os.environ["STRETTO_RESTART_COUNT"])
    hear = introducing._Introduction._hear
    def hear_and_mark(self, waiting):
        mark(f"told{rank}-{attempt}")
        hear(self, waiting)
    introducing._Introduction._hear = hear_and_mark
    launch = detect(os.environ)
    listener = socket.create_server((local_address(launch)[0], 0))
    peers = introducing.introduce(launch, "%s:%d" % listener.getsockname()[:2], Timeouts(meet_s=50)).peers
    print("met", sorted(peer.rank for peer in peers), "in attempt", attempt, flush=True)
    if attempt == 0:
        if rank == 1: sys.exit(3)
        wait_for("told1-1")
        raise PeerLost(1, "its connection closed")
    introducing.farewell(launch)
"""


def test_two_nodes_start_again_and_meet_at_the_same_rendezvous(start: Start, secret_file: Path) -> None:
    environ = {**os.environ, "STRETTO_INTERFACE": "lo"}
    options = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{launch_plan.free_port()}", "--secret-file", str(secret_file)]
    options += ["--max-restarts", "1", "--no-prefix"]
    launchers = [start(MEET_AGAIN, *options, "--node", str(node), env=environ, patience={"RESTART_S": 0.01}) for node in range(2)]
    outputs = [launcher.communicate(timeout=LIMIT_S) for launcher in launchers]

    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    for output, errors in outputs:
        assert output == "met [0, 1] in attempt 0\nmet [0, 1] in attempt 1\n"
        assert "restart 1 of 1" in errors


def test_a_node_with_another_secret_is_noticed_by_the_node_that_waits_for_it(start: Start, tmp_path: Path) -> None:
    meeting = f"127.0.0.1:{launch_plan.free_port()}"
    environ = {**os.environ, "STRETTO_INTERFACE": "lo"}
    launchers = []
    # Node 1 first: its worker knocks from the moment on when node 0's coordinator listens, which is before rank 0 begins to wait.
    for node, digit, patience_s in ((1, "7", LIMIT_S), (0, "6", 3)):
        secret = tmp_path / f"{node}.secret"
        secret.write_text(digit * 64)
        secret.chmod(0o600)
        options = ["--nodes", "2", "--node", str(node), "--rendezvous", meeting, "--secret-file", str(secret)]
        script = f"mark('knocks{node}')\n" + textwrap.dedent(MEET).replace("Timeouts.of(60)", f"Timeouts(meet_s={patience_s})")
        launchers.append(start(script, *options, env=environ))
        wait_until(f"node {node} runs", (tmp_path / f"knocks{node}").exists)
    of_1, of_0 = (launcher.communicate(timeout=LIMIT_S)[1] for launcher in launchers)

    assert "SecretError: rank 1 was turned away" in of_1
    told = of_0[of_0.index("stretto: rank 0 of 2 failed first") :]
    assert "JobError: Rank 1 of 2 did not join" in told
    assert re.search(r"\d+ connection attempts? (was|were) refused because (it|they) did not know the job secret "
                     r"\(last from (127\.0\.0\.1|an unknown address)\)", told), told  # fmt: skip
    assert "the same secret" in told and "Allow more time" not in told


def refusal(*options: str, target: str | None = None) -> str:
    """What `stretto run` says about options that cannot work; it must say so with exit code 2 and no traceback."""
    command = [sys.executable, "-m", "stretto", "run", *options, target or __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == "", done
    return done.stderr


def test_joining_across_machines_without_a_secret_is_refused_with_the_command_that_makes_one() -> None:
    said = refusal("--nodes", "2", "--node", "1", "--rendezvous", "127.0.0.1:29400")

    assert "--secret-file" in said and "stretto secret > job.secret" in said


def test_a_rendezvous_that_cannot_work_is_refused_with_what_to_do() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert f"port {port} is in use" in refusal("--rendezvous", f"127.0.0.1:{port}")
    assert "HOST:PORT" in refusal("--rendezvous", "somewhere")
    assert "does not have the address 192.0.2.77" in refusal("--rendezvous", "192.0.2.77:29400")
    assert "without --rendezvous" in refusal("--nodes", "2", "--node", "0")


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((2, 2, 0), "--node 2 with --nodes 2"),
        ((2, None, 0), "--nodes 2 without --node"),
        ((1, None, -1), "--max-restarts -1"),
    ],
)
def test_counts_that_cannot_work_are_refused(counts: tuple[int, int | None, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        launch_plan.check_counts(*counts)


def test_values_that_cannot_work_are_refused_on_the_command_line() -> None:
    assert "-n 0" in refusal("-n", "0")
    assert "--timeout 0: a timeout is" in refusal("--timeout", "0")
    assert "--strategy 'ddp('" in refusal("--strategy", "ddp(")


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "-inf", "nan"])
def test_a_timeout_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--meet-timeout {seconds}: a timeout is a positive number of seconds"):
        launch_plan.check_seconds("--meet-timeout", float(seconds))


@pytest.mark.parametrize("text", ["", "ddp(", "ddp(); ddp()", "{}", "1 + 1", "x" * 5000, "(" * 3000])
def test_a_strategy_that_cannot_be_read_is_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--strategy"):
        launch_plan.check_strategy(text)
    launch_plan.check_strategy("ddp")
    launch_plan.check_strategy(" Strategy(compress=ErrorFeedback(Sign())) ")


def test_a_script_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert "no such file" in refusal(target=str(tmp_path / "missing.py"))
    assert "__main__.py" in refusal(target=str(tmp_path))
