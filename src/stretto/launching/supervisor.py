"""The supervisor: a small process between the launcher and the workers whose one duty is that nothing outlives the job.

    launcher ──commands──▶ supervisor ──fork+exec──▶ coordinator, worker 0, worker 1, ...   (each in a session of its own)
             ◀──reports───

Who dies, and why nobody is left behind:
- the launcher (even by `kill -9`): the kernel closes its end of the command pipe, the supervisor reads end-of-file and
  kills every descendant. A pipe works on every Unix and, unlike a parent-death signal, does not depend on which
  *thread* forked.
- a worker: its children fall to the supervisor, which is a "child subreaper" (Linux), so they stay findable below the
  supervisor, even those that made a session of their own, and are ended with the job.
- the supervisor itself: each worker asked the kernel for SIGKILL at its parent's death. (The supervisor has one thread, which
  forks.)

Commands, one JSON object a line:
    {"do": "start", "name": N, "argv": [...], "env": {...}, "stdio": [in, out, err], "keep": [fd, ...],
     "again": whether the same may be started another time, with these descriptors}
    {"do": "signal", "signal": S, "names": [N, ...]}    to the groups of those that run
    {"do": "kill"}                                      SIGKILL to every descendant
    {"do": "finish"}                                    let stragglers go, then make them; then the supervisor ends
Reports, one JSON object a line:
    {"name": N, "pid": P, "code": null}                 started
    {"name": N, "pid": P, "code": C}                    ended; C < 0: by signal -C

The file imports the standard library only and is run by its path with `python -I -S`: about 10 ms and 9 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
LEAVE_S = 1.0  # after the last worker: helpers such as multiprocessing's resource tracker clean up and go by themselves
TERMINATE_S = 2.0  # after SIGTERM
GIVE_UP_S = 2.0  # after SIGKILL: only a process stuck in the kernel is left then, and nobody can end that


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that made it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the request was in force


def descendants(root: int) -> list[int]:
    """Every process below `root`, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:
                    parent = int(stat.read().rpartition(b")")[2].split()[1])  # the name may hold spaces and ')'
            except (OSError, IndexError, ValueError):
                continue  # it ended while we looked
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def send_signal(pid: int, number: int, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or it became another user
        (os.killpg if group else os.kill)(pid, number)


class Supervisor:
    def __init__(self, commands: int, reports: int) -> None:
        self.commands = commands
        self.reports = reports
        self.pid = os.getpid()
        self.running: dict[int, str] = {}  # pid (= process group) -> name
        self.unread = b""
        self.finishing = False

    def run(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only a handled signal writes to the wakeup fd
        while not self.finishing:
            ready, _, _ = select.select([self.commands, wake_read], [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
            self.reap()
            if self.commands in ready:
                self.obey()
        self.finish()

    def obey(self) -> None:
        data = os.read(self.commands, 1 << 16)
        if not data:  # the launcher is gone
            self.kill()
            self.finishing = True
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if command["do"] == "start":
                self.start(command)
            elif command["do"] == "signal":
                for pid, name in self.running.items():
                    if name in command["names"]:
                        send_signal(pid, command["signal"], group=True)
                        send_signal(pid, signal.SIGCONT, group=True)  # a stopped process would not hear it otherwise
            elif command["do"] == "kill":
                self.kill()
            else:
                self.finishing = True

    def start(self, command: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self.become(command)
        self.running[pid] = command["name"]
        for descriptor in () if command["again"] else {*command["stdio"], *command["keep"]}:
            os.close(descriptor)  # else the launcher would never see the worker's end-of-file
        self.report(command["name"], pid, None)

    def become(self, command: dict[str, Any]) -> None:
        """In the child: from here to exec. Every other descriptor closes at exec (Python's are not inheritable)."""
        try:
            os.setsid()
            end_with_parent(self.pid)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            for target, descriptor in enumerate(command["stdio"]):
                os.dup2(descriptor, target)  # the launcher gives descriptors above 2, so none is overwritten early
            for descriptor in command["keep"]:
                os.set_inheritable(descriptor, True)
            os.execvpe(command["argv"][0], command["argv"], command["env"])
        except BaseException as problem:
            os.write(2, f"cannot start {command['argv'][0]}: {problem}\n".encode())
        os._exit(127)

    def report(self, name: str, pid: int, code: int | None) -> None:
        line = json.dumps({"name": name, "pid": pid, "code": code}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone: end-of-file on the command pipe ends us
            os.write(self.reports, line)

    def reap(self) -> bool:
        """Collect the dead. True while children (own or adopted) are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            name = self.running.pop(pid, None)
            if name is not None:
                self.report(name, pid, os.waitstatus_to_exitcode(status))

    def signal_everything(self, number: int) -> None:
        for pid in descendants(self.pid):
            send_signal(pid, number)

    def kill(self) -> None:
        self.signal_everything(signal.SIGKILL)

    def finish(self) -> None:
        self.wait_for_none(LEAVE_S)
        self.signal_everything(signal.SIGTERM)
        self.wait_for_none(TERMINATE_S)
        deadline = time.monotonic() + GIVE_UP_S
        while self.reap() and time.monotonic() < deadline:
            self.kill()  # again each time: one of them may have forked while we looked
            time.sleep(0.01)

    def wait_for_none(self, seconds: float) -> None:
        """Until no descendant is left, the time is over or, whatever the time, the launcher is gone."""
        deadline = time.monotonic() + seconds
        while self.reap() and time.monotonic() < deadline:
            ready, _, _ = select.select([self.commands], [], [], 0.01)
            if ready:
                if not os.read(self.commands, 1 << 16):
                    return self.kill()
                self.kill()  # the only command that makes sense now: a second Ctrl-C


def main() -> None:
    commands, reports = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in map(int, sys.argv[1:]):
        os.set_inheritable(descriptor, False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides; its end is ours
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(commands, reports).run()


if __name__ == "__main__":
    main()
