"""Where running labs can be reached: one directory per lab, in a directory only this user can enter.

    RUNTIME/NAME/control      the socket that `stretto lab cut 1` talks to
    RUNTIME/NAME/ledger/      what each worker counted on its wire, written when it leaves

RUNTIME is /run/user/UID/stretto where the system has that, else stretto-UID in the directory for temporary files. A
lab holds a lock on its directory; the kernel lets go of the lock when the lab ends, whichever way, so a directory
that can be locked is a left-over and is removed by whoever comes next.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from stretto.errors import ConfigurationError, JobError
from stretto.lab import messages

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_ANSWER_S = 20.0


def runtime_directory() -> Path:
    """The user's own directory for labs, made if needed; refused when somebody else could have put things there."""
    uid = os.getuid()
    system = Path(f"/run/user/{uid}")
    usable = system.is_dir() and system.stat().st_uid == uid and os.access(system, os.W_OK)
    path = system / "stretto" if usable else Path(tempfile.gettempdir()) / f"stretto-{uid}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise JobError(
            f"{path} is to hold the sockets of labs, but it is not a directory that only user {uid} can enter.\n"
            f"Remove it, or set TMPDIR to a directory of your own."
        )
    return path


class LabFolder:
    """The directory of one lab, locked, with the listening socket in it."""

    def __init__(self, name: str | None) -> None:
        self.name, self.path, self.lock = _claim(name)
        self.ledger.mkdir(mode=0o700, exist_ok=True)
        self.listener = self._listen(self.path / "control")

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    def _listen(self, path: Path) -> socket.socket:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(8)
        except OSError as error:
            listener.close()
            self.remove()
            raise JobError(f"the lab's control socket {path} cannot be made: {error}. Set TMPDIR to a short path.") from error
        return listener

    def remove(self) -> None:
        """Whatever the supervisor has left of the directory. Only our own: another lab may have taken the name by now."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.lock), os.stat(self.path)):
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _claim(name: str | None) -> tuple[str, Path, int]:
    for candidate in _candidates(name):
        path = runtime_directory() / candidate
        path.mkdir(mode=0o700, exist_ok=True)
        lock = _lock(path)
        if lock is not None:
            return candidate, path, lock
    raise ConfigurationError(f"a lab named {name!r} is running already. Give this one another name: --name another.")


def _candidates(name: str | None) -> Iterator[str]:
    if name is None:
        yield f"lab-{os.getpid()}"
        yield from (f"lab-{os.getpid()}-{number}" for number in range(2, 1000))
    elif _NAME.fullmatch(name):
        yield name
    else:
        raise ConfigurationError(
            f"name={name!r} cannot name a lab: it becomes a directory.\n"
            f"Use up to 40 letters, digits, '.', '_' and '-', and start with a letter or digit: --name first."
        )


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a directory; None when a running lab has it, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def running() -> list[str]:
    """Names of this user's running labs. Left-overs of killed ones are cleared away."""
    names = []
    for path in sorted(runtime_directory().iterdir()):
        lock = _lock(path)
        if lock is None:
            names.append(path.name)
        else:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    return names


def ask(name: str | None, request: messages.LinkRequest) -> None:
    """Have a running lab change a link; with no name, the one that is running."""
    path = runtime_directory() / _choose(name) / "control"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as sock:
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(str(path))
            messages.send(sock, messages.LinkEnvelope(1, request))
            received = messages.receive(sock, messages.REPLY)
        except OSError as error:
            raise JobError(f"the lab at {path} does not answer: {error}. It may be ending; try again.") from error
    if received is None:
        raise JobError(f"the lab at {path} ended before it answered.")
    reply = received[0]
    if isinstance(reply, messages.RequestFailed):
        raise (ConfigurationError if reply.configuration else JobError)(reply.message)


def _choose(name: str | None) -> str:
    names = running()
    if not names:
        raise JobError(
            f"no lab of user {os.getuid()} is running, so there is no link to change.\n"
            f"Start one in another terminal: stretto lab --hosts 4 -- python train.py\n"
            f"(One that was started with sudo belongs to root: use sudo here too.)"
        )
    if name is None and len(names) > 1:
        raise JobError(f"{len(names)} labs are running: {', '.join(names)}. Say which one: --name {names[0]}")
    if name is not None and name not in names:
        raise JobError(f"no lab named {name!r} is running; these are: {', '.join(names)}.")
    return name or names[0]
