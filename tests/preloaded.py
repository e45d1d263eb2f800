"""Real workers, without the seconds that each would spend importing torch.

One process imports torch and then only forks. A script runs as the main program of a fork of it, alone or in n workers that
`stretto.launch` forks from there; a function, in such workers. They are real processes with sockets, random numbers and an end of
their own. What a fork does not show is how the interpreter starts and how the command line launches: tests about that use
`stretto run`. (The tests' own process cannot be forked: once it has run a backward, autograd refuses to in a fork of it.)
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")
ROOT = Path(__file__).parents[1]

WARM_COMMANDS = ("python", "stretto", "torchrun")
CLIENT = (Path(__file__).parent / "warm_client.py").read_text()

FORKS = """
import ctypes, json, os, pickle, runpy, signal, sys, traceback
import warm
import torch, torch._dynamo  # which the first optimizer imports, and takes as long as the rest of torch
import numba  # which compiles the codecs' kernels
import stretto.api, stretto.distributing, stretto.checkpoint, stretto.sampler
from stretto.launching import spawn
from stretto.launching.spawn import launch
spawn.ACCUSED_S = 100.0  # who failed first is found out however slowly a busy machine lets workers end

def main_program(path, arguments):
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()

def call(packed, workers, result):
    fn, arguments = pickle.loads(bytes.fromhex(packed))
    try:
        outcome = launch(fn, workers, *arguments, start_method="fork")
    except Exception as error:
        outcome = error
    with open(result, "wb") as file:
        pickle.dump(outcome, file)

def do(request):
    signal.alarm(request["timeout_s"])  # ends it; and its workers, who end with it
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: nobody is left behind
    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    torch.set_num_threads(1)
    if "shell" in request:
        sys.exit(warm.shell(request["shell"], request["environ"], request["socket"]))
    elif "call" in request:
        work = lambda: call(request["call"], request["workers"], request["result"])
        sys.exit(warm.call(work, request["environ"], request["socket"]))
    elif request["workers"]:
        work = lambda: launch(main_program, request["workers"], request["script"], request["arguments"], start_method="fork")
        sys.exit(warm.call(work, request["environ"], request["socket"]))
    else:
        main_program(request["script"], request["arguments"])
        stretto.shutdown()

def exit_code(request):
    try:
        do(request)
    except SystemExit as ended:
        if isinstance(ended.code, str): print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = exit_code(json.loads(line))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)  # without taking torch apart
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
"""


class Preloaded:
    """The process that has torch. It does one thing at a time."""

    def __init__(self) -> None:
        path = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = plain_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-c", FORKS]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)

    def run(
        self, script: Path, *arguments: object, folder: Path, workers: int = 0, timeout_s: int = 110
    ) -> subprocess.CompletedProcess[str]:
        """`python script *arguments` in `folder`; with `workers`, in so many (then any failure ends with 1)."""
        with tempfile.TemporaryDirectory() as files:
            request = {"script": str(script), "arguments": [*map(str, arguments)], "workers": workers, "folder": str(folder)}
            return self._ask(
                request | warm_commands(Path(files), plain_environment() | {"OMP_NUM_THREADS": "1"}), Path(files), timeout_s
            )

    def launch(self, fn: Callable[..., R], n: int, *args: Any, timeout_s: int = 110) -> list[R]:
        """As `stretto.launch`: `fn` is imported by its name, and from a module that the tests can import."""
        with tempfile.TemporaryDirectory() as files:
            result = Path(files, "result")
            request = {"call": pickle.dumps((fn, args)).hex(), "workers": n, "folder": files, "result": str(result)}
            done = self._ask(
                request | warm_commands(Path(files), plain_environment() | {"OMP_NUM_THREADS": "1"}), Path(files), timeout_s
            )
            assert done.returncode == 0, done.stderr
            outcome: list[R] | Exception = pickle.loads(result.read_bytes())
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def shell(
        self, command: str, *, folder: Path, environ: Mapping[str, str] | None = None, timeout_s: int = 110
    ) -> subprocess.CompletedProcess[str]:
        """`bash -c command`, in which `python SCRIPT`, `stretto` and `torchrun` are forks of the process that has torch, and so
        are the workers of `stretto run` (see `warm.py`). Without `environ`: this environment, less what belongs to a job."""
        with tempfile.TemporaryDirectory() as files:
            request: dict[str, object] = {"shell": command, "folder": str(folder)}
            return self._ask(request | warm_commands(Path(files), environ or plain_environment()), Path(files), timeout_s)

    def _ask(self, request: dict[str, object], files: Path, timeout_s: int) -> subprocess.CompletedProcess[str]:
        out, err = files / "stdout", files / "stderr"
        request |= {"stdout": str(out), "stderr": str(err), "timeout_s": timeout_s}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        done = subprocess.CompletedProcess("preloaded", code, out.read_text(), err.read_text())
        assert code != -signal.SIGALRM, f"not ended within {timeout_s} s:\n{done.stdout}\n{done.stderr}"
        return done

    def close(self) -> None:
        self._process.communicate(timeout=60)


def plain_environment() -> dict[str, str]:
    """This environment, less what belongs to a job."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STRETTO_")}


def warm_commands(files: Path, environ: Mapping[str, str]) -> dict[str, object]:
    """Where programs find `python`, `stretto` and `torchrun` that are forks: what a request says of it."""
    bin = files / "bin"
    bin.mkdir()
    for name in WARM_COMMANDS:
        (bin / name).write_text(f"#!{sys.executable} -IS\n{CLIENT}")
        (bin / name).chmod(stat.S_IRWXU)
    variables = {**environ, "PATH": os.pathsep.join([str(bin), environ.get("PATH", "")])}
    variables |= {"WARM_PYTHON": str(bin / "python"), "REAL_PYTHON": sys.executable, "WARM_SOCKET": str(files / "socket")}
    return {"environ": variables, "socket": variables["WARM_SOCKET"]}
