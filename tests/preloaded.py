"""Scripts in real workers, without the second and a half that each would spend importing torch.

One process imports torch and then only forks. A script runs as the main program of a fork of it, alone or in n workers that
`stretto.launch` forks from there: real processes with sockets, random numbers and an end of their own. What a fork does not show
is how the interpreter starts and how the command line launches; tests about that use `stretto run`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = str(Path(__file__).parents[1] / "src")

FORKS = """
import ctypes, json, os, runpy, signal, sys, traceback
import torch, stretto.api, stretto.distributing, stretto.checkpoint, stretto.sampler, stretto.job.in_process

def main_program(path, arguments):
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()

def end_with(request):
    signal.alarm(request["timeout_s"])  # ends it; and its workers, who end with it
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: nobody is left behind
    os.chdir(request["folder"])
    os.environ.update(request["environ"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    torch.set_num_threads(1)
    try:
        if request["workers"]:
            stretto.launch(main_program, request["workers"], request["script"], request["arguments"], start_method="fork")
        else:
            main_program(request["script"], request["arguments"])
            stretto.shutdown()
    except SystemExit as ended:
        if isinstance(ended.code, str): print(ended.code, file=sys.stderr, flush=True)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = end_with(json.loads(line))
        sys.stdout.flush()
        os._exit(code)  # without taking torch apart
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Preloaded:
    """The process that has torch. One script at a time."""

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STRETTO_")}
        environ = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )

    def run(
        self,
        script: Path,
        *arguments: object,
        folder: Path,
        workers: int = 0,
        environ: dict[str, str] | None = None,
        timeout_s: int = 60,
    ) -> subprocess.CompletedProcess[str]:
        """`python script *arguments`; with `workers`, in so many (then 1 is the exit code of any failure)."""
        with tempfile.TemporaryDirectory() as kept:
            out, err = Path(kept, "stdout"), Path(kept, "stderr")
            request = {
                "script": str(script), "arguments": [str(argument) for argument in arguments], "folder": str(folder),
                "workers": workers, "environ": environ or {}, "stdout": str(out), "stderr": str(err), "timeout_s": timeout_s,
            }  # fmt: skip
            code = self._ask(request)
            done = subprocess.CompletedProcess([str(script)], code, out.read_text(), err.read_text())
            assert code != -signal.SIGALRM, f"{script} has not ended within {timeout_s} s:\n{done.stdout}\n{done.stderr}"
            return done

    def _ask(self, request: dict[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=10)
