"""`stretto run` seen from outside: real processes, small scripts without torch, every wait with a deadline."""

from __future__ import annotations

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

from stretto.job import launch_plan
from stretto.job.launch_report import Failure, culprit, failure_block, last_words

Start = Callable[..., "subprocess.Popen[str]"]

# What the scripts below share: `mark` tells the test and other ranks that a point was reached, `wait_for` waits for it.
HELPERS = """
import os, signal, subprocess, sys, time
rank, world_size = int(os.environ["STRETTO_RANK"]), int(os.environ["STRETTO_WORLD_SIZE"])
folder = sys.argv[1]
def mark(name, text=""):
    with open(f"{folder}/{name}.new", "w") as file: file.write(str(text))
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")
def wait_for(name, seconds=20):
    end = time.monotonic() + seconds
    while not os.path.exists(f"{folder}/{name}"):
        if time.monotonic() > end: sys.exit(f"no {name}")
        time.sleep(0.01)
def have_children():
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
    mark(f"child{rank}.pid", subprocess.Popen(sleeper, stderr=subprocess.DEVNULL).pid)
    mark(f"daemon{rank}.pid", subprocess.Popen(sleeper, start_new_session=True).pid)
    mark(f"worker{rank}.pid", os.getpid())
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(script, *options, args=()) -> the launcher, running `script` with the folder as its first argument."""
    started: list[subprocess.Popen[str]] = []

    def start_one(script: str, *options: str, args: tuple[str, ...] = (), **more: object) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(HELPERS + textwrap.dedent(script))
        command = [sys.executable, "-m", "stretto", "run", *options, str(path), str(tmp_path), *args]
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
        launcher.wait(10)


def wait_until(what: str, condition: Callable[[], bool], seconds: float = 20) -> None:
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


def wait_until_dead(some: list[int], seconds: float = 5) -> None:
    wait_until("no process is left", lambda: not any(map(is_alive, some)), seconds)


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
    output, errors = launcher.communicate(timeout=30)

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

    assert launcher.communicate(timeout=30)[0] == "bare\nbare\n"


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

    assert launcher.wait(20) == 0
    assert b"\x1b[36m[0]\x1b[0m hello" in shown and b"\x1b[33m[1]\x1b[0m hello" in shown
    assert b"2 of 2 workers alive" in shown

    output, errors = start(script, "-n", "2", env=environ).communicate(timeout=20)
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

    output, _ = launcher.communicate("some text", timeout=20)
    assert sorted(output.splitlines()) == ["[0] 'some text'", "[1] ''"]


def test_a_reader_that_goes_away_ends_the_job(start: Start, tmp_path: Path) -> None:
    launcher = start("have_children()\nwhile True: print('y' * 100)", "-n", "2")
    everybody = pids(tmp_path, 2)
    assert launcher.stdout is not None
    launcher.stdout.close()

    assert launcher.wait(10) == 128 + signal.SIGPIPE
    wait_until_dead(everybody)


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
    launcher.communicate(timeout=20)
    assert launcher.returncode == 4


def test_a_reader_that_pauses_for_ever_does_not_make_the_launcher_unstoppable(start: Start, tmp_path: Path) -> None:
    launcher = start("mark('worker0.pid', os.getpid()); print('y\\n' * 500_000)")
    wait_until("the worker runs", (tmp_path / "worker0.pid").exists)
    wait_until_dead([int((tmp_path / "worker0.pid").read_text())])
    assert launcher.poll() is None  # it still has output that nobody reads
    launcher.send_signal(signal.SIGINT)

    assert launcher.wait(10) == 130


# Failure.


def test_a_failing_worker_ends_all_and_its_traceback_comes_last(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        if rank != 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stubborn: only SIGKILL ends these
        have_children()
        for other in range(world_size): wait_for(f"worker{other}.pid")
        if rank == 1:
            mark("failed")
            raise ValueError("the reason")
        time.sleep(120)
        """,
        "-n",
        "3",
    )
    everybody = pids(tmp_path, 3)
    wait_until("rank 1 fails", (tmp_path / "failed").exists)
    failed_at = time.monotonic()
    wait_until_dead(everybody)
    assert time.monotonic() - failed_at < 5
    _, errors = launcher.communicate(timeout=10)

    assert launcher.returncode == 1
    headline = errors.index("stretto: rank 1 of 3 failed first")
    assert "exited with code 1" in errors[headline:] and "2 other workers were stopped" in errors[headline:]
    assert errors[headline:].count("Traceback (most recent call last):") == 1
    assert errors.endswith("ValueError: the reason\n\n")


def test_a_killed_worker_ends_all_with_their_children(start: Start, tmp_path: Path) -> None:
    launcher = start("have_children()\ntime.sleep(120)", "-n", "3")
    everybody = pids(tmp_path, 3)
    os.kill(int((tmp_path / "worker2.pid").read_text()), signal.SIGKILL)

    wait_until_dead(everybody)
    _, errors = launcher.communicate(timeout=10)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "stretto: rank 2 of 3 failed first" in errors and "was killed by SIGKILL" in errors


def test_a_killed_launcher_leaves_nobody_behind(start: Start, tmp_path: Path) -> None:
    launcher = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nhave_children()\ntime.sleep(120)", "-n", "2")
    everybody = pids(tmp_path, 2)
    launcher.kill()

    wait_until_dead(everybody)


def test_a_killed_keeper_takes_the_workers_along(start: Start, tmp_path: Path) -> None:
    launcher = start(
        "mark(f'parent{rank}', os.getppid()); mark(f'worker{rank}.pid', os.getpid()); time.sleep(120)", "-n", "2"
    )
    wait_until("both run", lambda: all((tmp_path / f"worker{rank}.pid").exists() for rank in range(2)))
    keeper = int((tmp_path / "parent0").read_text())
    assert keeper != launcher.pid
    os.kill(keeper, signal.SIGKILL)

    wait_until_dead([int((tmp_path / f"worker{rank}.pid").read_text()) for rank in range(2)])
    _, errors = launcher.communicate(timeout=10)
    assert launcher.returncode == 2 and f"pid {keeper}" in errors


def test_the_exit_code_is_that_of_the_first_failure(start: Start) -> None:
    launcher = start(
        """
        if rank == 1: sys.exit(7)
        wait_for("never", seconds=60)
        """,
        "-n",
        "2",
    )
    _, errors = launcher.communicate(timeout=20)

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
    )
    _, errors = launcher.communicate(timeout=20)

    assert "stretto: rank 1 of 2 failed first" in errors
    assert errors.endswith("ValueError: the reason\n\n")


def test_if_all_accuse_a_silent_peer_the_first_to_end_is_shown(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        from stretto.errors import PeerLost
        mark(f"worker{rank}.pid", os.getpid())
        if rank == 0:
            wait_for("worker1.pid")
            raise PeerLost(1, "no heartbeat")
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
        "-n",
        "2",
    )
    _, errors = launcher.communicate(timeout=20)

    assert launcher.returncode == 1
    assert "rank 0 of 2 failed first" in errors and errors.endswith("PeerLost: rank 1 is lost: no heartbeat\n\n")
    wait_until_dead([int((tmp_path / "worker1.pid").read_text())])


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
    failure = Failure(rank=0, pid=1, code=-signal.SIGSEGV, after_s=1.0, stderr_tail=b"")

    assert failure.exit_code == 139 and culprit([failure]) is failure
    assert "was killed by SIGSEGV" in failure_block(failure, 1, 0)


# Stopping.


def test_ctrl_c_is_a_clean_stop(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        have_children()
        try:
            mark(f"ready{rank}"); time.sleep(120)
        except KeyboardInterrupt:
            mark(f"clean{rank}")
        """,
        "-n",
        "2",
    )
    everybody = pids(tmp_path, 2)
    wait_until("both are ready", lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=20)

    assert launcher.returncode == 130 and errors == ""
    assert (tmp_path / "clean0").exists() and (tmp_path / "clean1").exists()
    wait_until_dead(everybody)


def test_a_second_ctrl_c_kills(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        signal.signal(signal.SIGINT, lambda *_: mark(f"heard{rank}"))
        have_children()
        while True: time.sleep(1)
        """,
        "-n",
        "2",
    )
    everybody = pids(tmp_path, 2)
    launcher.send_signal(signal.SIGINT)
    wait_until("both heard the first", lambda: all((tmp_path / f"heard{rank}").exists() for rank in range(2)))
    launcher.send_signal(signal.SIGINT)
    asked_at = time.monotonic()

    assert launcher.wait(20) == 130
    assert time.monotonic() - asked_at < 4  # sooner than the 5 s of grace after the first
    wait_until_dead(everybody)


def test_sigterm_to_the_launcher_ends_the_workers(start: Start, tmp_path: Path) -> None:
    launcher = start("have_children()\ntime.sleep(120)", "-n", "2")
    everybody = pids(tmp_path, 2)
    launcher.terminate()

    assert launcher.wait(20) == 128 + signal.SIGTERM
    wait_until_dead(everybody)


# What a worker is told.


def test_workers_get_the_environment_of_the_contract(start: Start) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    wanted = [*names, *(f"STRETTO_{name}" for name in names), "STRETTO_RENDEZVOUS", "STRETTO_SECRET", "STRETTO_ENCRYPT"]
    wanted += ["MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "STRETTO_TIMEOUT"]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    launcher = start(f"print(*[os.environ[name] for name in {wanted}])", "-n", "2", "--timeout", "9", env=environ)
    output, errors = launcher.communicate(timeout=20)

    assert launcher.returncode == 0, errors
    for rank, line in enumerate(sorted(output.splitlines())):
        values = dict(zip(wanted, line.removeprefix(f"[{rank}] ").split(), strict=True))
        assert [values[name] for name in names] == [str(rank), "2", str(rank), "2"]
        assert [values[f"STRETTO_{name}"] for name in names] == [str(rank), "2", str(rank), "2"]
        assert re.fullmatch(r"127\.0\.0\.1:\d+", values["STRETTO_RENDEZVOUS"])
        assert re.fullmatch(r"[0-9a-f]{64}", values["STRETTO_SECRET"])
        assert values["STRETTO_ENCRYPT"] == "off" and values["STRETTO_TIMEOUT"] == "9"
        assert values["MASTER_ADDR"] == "127.0.0.1" and values["OMP_NUM_THREADS"] == "1"
        assert values["MASTER_PORT"] != values["STRETTO_RENDEZVOUS"].rpartition(":")[2]


def test_omp_num_threads_of_the_user_is_kept(start: Start) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "3"}
    launcher = start("print(os.environ['OMP_NUM_THREADS'])", "-n", "2", "--no-prefix", env=environ)

    assert launcher.communicate(timeout=20)[0] == "3\n3\n"


def test_arguments_reach_the_script_untouched(start: Start) -> None:
    arguments = ("-n", "5", "--timeout=x", "--", "--help", "", "ä b")
    launcher = start("print(sys.argv[2:])", "--no-prefix", args=arguments)

    assert launcher.communicate(timeout=20)[0] == f"{list(arguments)}\n"


def test_a_module_is_run_with_m(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import sys; print(__name__, sys.argv[1:])")
    command = [sys.executable, "-m", "stretto", "run", "-n", "2", "-m", "shop", "-m", "--nodes"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=True, env={**os.environ, "PYTHONPATH": path}
    )

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
    outputs = [launcher.communicate(timeout=20) for launcher in launchers]

    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    port = int(meeting.rpartition(":")[2]) + 1
    for node in range(2):
        assert sorted(outputs[node][0].splitlines()) == [
            f"{2 * node + local} 4 {local} {meeting} on {'5' * 64} {port}" for local in range(2)
        ]


MEET = """
    import socket
    from stretto.job.detect import detect
    from stretto.job.introduce import farewell, introduce
    from stretto.job.settle import local_address
    from stretto.timeouts import Timeouts
    launch = detect(os.environ)
    listener = socket.create_server((local_address(launch)[0], 0))
    peers = introduce(launch, "%s:%d" % listener.getsockname()[:2], Timeouts.of(20))
    print("met", sorted(peer.rank for peer in peers))
    farewell(launch)
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_workers_meet_through_the_coordinator_the_launcher_started(start: Start, tmp_path: Path, nodes: int) -> None:
    secret = tmp_path / "job.secret"
    secret.write_text("6" * 64)
    secret.chmod(0o600)
    meeting = ["--rendezvous", f"127.0.0.1:{launch_plan.free_port()}", "--secret-file", str(secret)]
    options = ["-n", "2", "--nodes", str(nodes), "--no-prefix", *(meeting if nodes > 1 else [])]
    # The nodes are one machine here: a loopback address is not published to "other machines" unless asked for.
    environ = {**os.environ, "STRETTO_INTERFACE": "lo"}
    launchers = [start(MEET, *options, "--node", str(node), env=environ) for node in range(nodes)]
    outputs = [launcher.communicate(timeout=40) for launcher in launchers]

    assert [launcher.returncode for launcher in launchers] == [0] * nodes, outputs
    assert all(output == f"met {list(range(2 * nodes))}\n" * 2 for output, _ in outputs)


def refusal(*options: str, target: str | None = None) -> str:
    """What `stretto run` says about options that cannot work; it must say so with exit code 2 and no traceback."""
    command = [sys.executable, "-m", "stretto", "run", *options, target or __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
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


def test_counts_that_cannot_work_are_refused() -> None:
    assert "-n 0" in refusal("-n", "0")
    assert "--node 2 with --nodes 2" in refusal("--nodes", "2", "--node", "2")
    assert "--nodes 2 without --node" in refusal("--nodes", "2", "--rendezvous", "127.0.0.1:29400")
    assert "--timeout 0" in refusal("--timeout", "0")


def test_a_script_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert "no such file" in refusal(target=str(tmp_path / "missing.py"))
    assert "__main__.py" in refusal(target=str(tmp_path))
