"""The launcher's end of the supervisor (see `supervisor.py`): start processes, signal them, hear how they ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SUPERVISOR = Path(__file__).with_name("supervisor.py")


def open_standard_descriptors() -> None:
    """Descriptors 0-2 exist from here on: a pipe that got such a number would be overwritten in the child."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One line from the supervisor: `name` started (`code` is None) or ended (`code` < 0: by signal `-code`)."""

    name: str
    pid: int
    code: int | None


@dataclass(slots=True)
class Pipes:
    """The descriptors of one process to be: ours to read, the child's to write. All are above 2 and close at exec."""

    stdout: int
    stderr: int
    child: tuple[int, int, int]  # stdin, stdout, stderr for the child

    @classmethod
    def open(cls, stdin: int | None = None) -> Pipes:
        child_stdin = os.dup(stdin) if stdin is not None else os.open(os.devnull, os.O_RDONLY)
        stdout, child_stdout = os.pipe()
        stderr, child_stderr = os.pipe()
        os.set_blocking(stdout, False)
        os.set_blocking(stderr, False)
        return cls(stdout, stderr, (child_stdin, child_stdout, child_stderr))


@dataclass(slots=True)
class Processes:
    """A running supervisor. `children` lists every descriptor that processes started later will be given."""

    children: Sequence[int]
    reports: int = field(init=False)
    _commands: int = field(init=False)
    _supervisor: subprocess.Popen[bytes] = field(init=False)
    _unread: bytes = field(init=False, default=b"")

    def __post_init__(self) -> None:
        commands_read, self._commands = os.pipe()
        self.reports, reports_write = os.pipe()
        os.set_blocking(self.reports, False)
        inherited = [commands_read, reports_write, *self.children]
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SUPERVISOR), *map(str, inherited)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone, which passes it on
        )
        for descriptor in inherited:
            os.close(descriptor)

    @property
    def supervisor_pid(self) -> int:
        return self._supervisor.pid

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        pipes: Pipes,
        keep: Sequence[int] = (),
        *,
        again: bool = False,
    ) -> None:
        """`again`: it may be started another time, with the same pipes, which stay open until the supervisor ends."""
        self._command(do="start", name=name, argv=list(argv), env=dict(env), stdio=pipes.child, keep=list(keep), again=again)

    def signal(self, number: int, names: Sequence[str]) -> None:
        self._command(do="signal", signal=int(number), names=list(names))

    def kill(self) -> None:
        self._command(do="kill")

    def finish(self) -> None:
        """The supervisor may end once nothing it started is left."""
        self._command(do="finish")

    def read(self) -> list[ProcessReport] | None:
        """The reports that have come, or None: the supervisor has ended and will say no more."""
        try:
            data = os.read(self.reports, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [ProcessReport(**json.loads(line)) for line in lines]

    def close(self, timeout_s: float) -> None:
        """Close the command pipe, which ends the supervisor and with it everything, and wait for that."""
        os.close(self._commands)
        try:
            self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # the workers' parent-death signal takes them along
            self._supervisor.wait()
        os.close(self.reports)

    def _command(self, **command: object) -> None:
        data = json.dumps(command).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError:
            pass  # the supervisor is dead: `read` says so
