"""Processes inside the hosts: started by the supervisor, signalled as a whole, buried.

A command becomes the leader of a session of its own in the namespaces of its host and is executed directly: no shell
and no wrapper stands between. "The processes of a host" are those in its network namespace, found in /proc, so that a
process that left its group (a daemon) is slowed with the rest. Where /proc of the lab could not be mounted, it is the
groups alone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from stretto.lab import namespaces
from stretto.lab.messages import Command
from stretto.lab.network import Host

_RESCAN_TURNS = 20  # 0.4 s of a duty cycle


@dataclass
class Child:
    process: int
    host: int
    service: bool
    ending: bool = False  # told to end: never stopped again


class Children:
    """All commands the supervisor has started and not yet buried."""

    def __init__(self, hosts: Sequence[Host], own_proc: bool) -> None:
        self._hosts = hosts
        self._own_proc = own_proc
        self._table: dict[int, Child] = {}
        self._strays: dict[int, list[int]] = {}
        self._turns = 0

    def start(self, host: int, command: Command, descriptors: Sequence[int], service: bool) -> int:
        """Fork and execute; descriptors become output (1 and 2), then 3, 4, ... A command not found exits with 127."""
        process = os.fork()
        if process == 0:
            _become(self._hosts[host], descriptors, command)
        self._table[process] = Child(process, host, service)
        return process

    def signal(self, process: int, signum: int) -> None:
        """To the whole group of a command. One that is gone already is no error."""
        child = self._table.get(process)
        if child is None:
            return
        if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            child.ending = True
        _signal_group(process, signum)
        if child.ending:
            _signal_group(process, signal.SIGCONT)

    def bury(self) -> list[tuple[int, int]]:
        """(process, return code) of commands that ended; what is left of their groups is killed."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return ended
            if found is None:
                return ended
            child = self._table.pop(found.si_pid, None)
            if child is not None:
                # Before the leader is reaped: until then nobody else can be given its number.
                _signal_group(found.si_pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            if child is not None:
                ended.append((found.si_pid, os.waitstatus_to_exitcode(status)))

    def busy(self, host: int) -> bool:
        return any(child.host == host and not child.service for child in self._table.values())

    def pause(self, host: int, running: bool) -> None:
        """Stop or continue everything on a host but the lab's own services."""
        signum = signal.SIGCONT if running else signal.SIGSTOP
        for child in self._table.values():
            if child.host == host and not child.service and not (child.ending and not running):
                _signal_group(child.process, signum)
        self._turns += 1
        if self._turns % _RESCAN_TURNS == 1 or host not in self._strays:
            self._strays[host] = self._outside_groups(host)
        for process in self._strays[host]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signum)

    def _outside_groups(self, host: int) -> list[int]:
        if not self._own_proc:
            return []
        groups = set(self._table)
        return [process for process in _processes_in(self._hosts[host].inode) if _group(process) not in groups]


def _become(host: Host, descriptors: Sequence[int], command: Command) -> None:
    """The child's side of a fork: never returns."""
    try:
        os.setsid()
        _forget_signals()
        namespaces.enter(host.net)
        namespaces.enter(host.uts)
        _place(descriptors)
        _execute(command)
    except BaseException as error:  # whatever it is, the child must not go on as a second supervisor
        os.write(2, f"stretto lab: {error!r}\n".encode(errors="replace"))
        os._exit(126)


def _execute(command: Command) -> None:
    try:
        os.chdir(command.directory)
        os.execvpe(os.fsdecode(command.argv[0]), command.argv, dict(command.environment))
    except (OSError, ValueError) as error:
        os.write(2, f"stretto lab: cannot run {os.fsdecode(command.argv[0])!r}: {error}\n".encode(errors="replace"))
        os._exit(127)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)


def _place(descriptors: Sequence[int]) -> None:
    """Null device as 0, the output as 1 and 2, the others as 3, 4, ..."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDONLY)
    # Moved out of the way first: a descriptor may sit on a number that another one is to get.
    output, *others = (fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in descriptors)
    for number, descriptor in enumerate([null, output, output, *others]):
        os.dup2(descriptor, number, inheritable=True)


def _signal_group(process: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signum)


def _group(process: int) -> int:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return -1


def _processes_in(inode: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1":
            with suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino == inode:
                    found.append(int(entry))
    return found
