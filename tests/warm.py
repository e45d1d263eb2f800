"""Commands that would start interpreters, run by forks of a process that has torch: what `preloaded.shell` is made of. What
`preloaded.run` and `launch` run in workers may start such commands too: a worker's servers are forks there as well.

    bash ── python train.py ──────────▶ a fork runs train.py
         ── stretto run -n 2 train.py ▶ a fork is the launcher ── its supervisor, a fork ── workers: forks that run train.py
                                        a worker's servers: their keepers are real, and they are forks

A fork takes the place of `exec` and of nothing else: the launcher, the supervisor and the workers are the processes that they
always are, with their own pids, sessions, pipes, environments and exit codes. Only `python [-u] SCRIPT` is run so; any other
command line, such as the coordinator's, is executed. What is not shown here is how an interpreter starts and what it imports:
`tests/test_examples.py` and `tests/launching/test_launch.py` start real ones.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import process
from typing import Any, NoReturn

import torch

from stretto import cli
from stretto.aggregate.parameter_server import process as parameter_server
from stretto.launching import processes, supervisor

PR_SET_PDEATHSIG = 1


def shell(command: str, environ: Mapping[str, str], path: str) -> int:
    """Run `bash -c command`, and whatever it asks for at the socket `path`, until it ends."""

    def start() -> Callable[[], int | None]:
        return subprocess.Popen(["bash", "-c", command], env=dict(environ), preexec_fn=end_with_parent).poll

    return while_answering(path, start)


def call(function: Callable[[], Any], environ: Mapping[str, str], path: str) -> int:
    """Call `function` in a fork, and run whatever it asks for at the socket `path`, until it ends."""

    def program() -> int:
        take_environment(environ)
        function()
        return 0

    def start() -> Callable[[], int | None]:
        pid = in_a_fork(program)

        def poll() -> int | None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if ended else None

        return poll

    return while_answering(path, start)


def while_answering(path: str, start: Callable[[], Callable[[], int | None]]) -> int:
    """`start` begins something and returns how to ask for its exit code; until it has one, programs are run for the clients that
    connect to `path`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        poll = start()
        while (code := poll()) is None:
            if select.select([listener], [], [], 0.01)[0]:
                connection, _ = listener.accept()
                with connection:
                    in_a_fork(partial(answer, connection))
    return code


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def in_a_fork(function: Callable[[], int]) -> int:
    """The pid of a child that ends with what `function` returns, and with its parent."""
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        os._exit(as_main_program(function))
    return pid


def answer(connection: socket.socket) -> int:
    """Be one program for a client; tell it the exit code."""
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i", ancillary[0][2])
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(size, "big")))

    def program() -> int:
        connection.close()
        os.chdir(request["folder"])
        take_streams(streams)
        return programs[request["name"]](request["arguments"], request["environ"])

    pid = in_a_fork(program)
    ended = status = 0
    while not ended:
        if select.select([connection], [], [], 0.005)[0]:  # the client says no more: it was killed
            os.kill(pid, signal.SIGKILL)
        ended, status = os.waitpid(pid, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        connection.sendall(f"{code}\n".encode())
    return 0


def take_streams(descriptors: Sequence[int]) -> None:
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)


# ---------------------------------------------------------------- the programs


def python(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """`python [-u] SCRIPT ARGUMENTS` or `python [-u] -m MODULE ARGUMENTS`, with one of `MODULES`."""
    unbuffered = arguments[0] == "-u"
    sys.stdout.reconfigure(write_through=unbuffered)  # type: ignore[union-attr]
    first, *rest = arguments[1:] if unbuffered else arguments
    if first == "-m":
        return MODULES[rest[0]](rest[1:], environ)
    take_environment(environ)
    sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
    sys.argv = [first, *rest]
    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # where processes that it spawns look for the script
    runpy.run_path(first, run_name="__main__")
    return 0


def stretto(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    take_environment(environ)
    processes.subprocess = Subprocess  # type: ignore[attr-defined,assignment]
    sys.argv = ["stretto", *arguments]
    cli.main()
    return 0


def torchrun(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    take_environment(environ)
    sys.argv = ["torchrun", *arguments]
    runpy.run_module("torch.distributed.run", run_name="__main__")
    return 0


def server(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    take_environment(environ)
    sys.stdin = open(0)  # noqa: SIM115  # what was here before has read ahead
    sys.argv = ["server", *arguments]
    return parameter_server.main()


programs = {"python": python, "stretto": stretto, "torchrun": torchrun}
MODULES = {"stretto": stretto, "torch.distributed.run": torchrun}  # as in `warm_client.py`
MODULES["stretto.aggregate.parameter_server.process"] = server


def take_environment(environ: Mapping[str, str]) -> None:
    """What an interpreter and torch read of it when they start."""
    os.environ.clear()
    os.environ.update(environ)
    sys.executable = environ["WARM_PYTHON"]  # what it starts is warm, too
    sys.path[:] = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    if environ.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))


def as_main_program(function: Callable[[], int]) -> int:
    """What an interpreter does about its main program's end: the exit code."""
    code = 0
    try:
        code = function()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


# ---------------------------------------------------------------- the supervisor and its workers


class ForkedSupervisor(supervisor.Supervisor):
    """It forks as ever; a worker then runs its script instead of executing an interpreter that would."""

    def become(self, command: dict[str, Any]) -> None:
        argv = command["argv"]
        if argv[:2] == [sys.executable, "-u"] and (not argv[2].startswith("-") or (argv[2] == "-m" and argv[3] in MODULES)):
            os.execvpe = lambda *_: run_instead(argv, command["env"])
        super().become(command)


def run_instead(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    close_as_exec_does()
    os._exit(as_main_program(lambda: python(argv[1:], environ)))


def close_as_exec_does() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2 and not os.get_inheritable(int(name)):
                os.close(int(name))


class SupervisorProcess(subprocess.Popen[bytes]):
    """`Popen([python, -I, -S, supervisor.py, ...])`, by a fork."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *more: Any) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for descriptor in pass_fds:
                os.set_inheritable(descriptor, True)
            close_as_exec_does()
            signal.set_wakeup_fd(-1)
            sys.argv = list(args[3:])
            supervisor.Supervisor = ForkedSupervisor  # type: ignore[misc]
            supervisor.main()
            os._exit(0)
        self._child_created = True


class Subprocess:
    """`subprocess`, as the launcher's end of the supervisor uses it."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired
    Popen = SupervisorProcess
