"""The few system calls a lab is made of: new namespaces, entering them, mounting in them.

A namespace here never has a name in the file system: it lives as long as a process or an open file descriptor holds
it, so the kernel cleans up whatever way the lab ends.

Only single-threaded processes may call these (a thread has its own namespaces; `unshare` of a user namespace is refused
in a process with several): they are called in the lab's supervisor, never in the process that uses the `Lab` object.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

_NEW_MOUNT = 0x0002_0000
_NEW_UTS = 0x0400_0000
_NEW_USER = 0x1000_0000
_NEW_PID = 0x2000_0000
_NEW_NET = 0x4000_0000
_PRIVATE = _NEW_MOUNT | _NEW_UTS | _NEW_PID | _NEW_NET
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8


class NamespacesRefused(Exception):
    """The system does not let this user make namespaces. The text says what to do."""


def enter_private() -> None:
    """Move to fresh mount, host name and network namespaces; the next child also starts a fresh process namespace.

    As root directly. Otherwise inside a new user namespace where the user keeps its own id: files it writes stay
    its own, and commands it starts have no more rights than before.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        unshare(_PRIVATE)
        return
    except OSError as refused:
        if refused.errno not in (errno.EPERM, errno.EACCES):
            raise NamespacesRefused(_advice(uid, f"unshare: {refused.strerror}")) from refused
    try:
        unshare(_NEW_USER | _PRIVATE)  # from here until the maps are written this process has no valid id
        # Without "deny" the kernel does not let an ordinary user write a group map.
        with suppress(FileNotFoundError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as refused:
        raise NamespacesRefused(_advice(uid, f"user namespace: {refused.strerror}")) from refused


def _advice(uid: int, reason: str) -> str:
    return (
        f"a lab needs network namespaces, and this system does not let user {uid} make them ({reason}).\n"
        f"Run it as root (sudo), or allow user namespaces:\n"
        f"  Ubuntu 24.04:  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0\n"
        f"  older Debian:  sysctl -w kernel.unprivileged_userns_clone=1\n"
        f"  a limit of 0:  sysctl -w user.max_user_namespaces=1000\n"
        f"  Docker:        docker run --privileged ..."
    )


def new_host(name: str | None) -> tuple[int, int]:
    """Descriptors of a fresh network and host name namespace; the caller stays where it was."""
    home = current("net"), current("uts")
    unshare(_NEW_NET | _NEW_UTS)
    if name is not None:
        socket.sethostname(name)
    made = current("net"), current("uts")
    for descriptor in home:
        enter(descriptor)
        os.close(descriptor)
    return made


def current(kind: str) -> int:
    """A descriptor of the namespace this process is in."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def enter(descriptor: int) -> None:
    """Enter the namespace of an open descriptor. A socket made from now on belongs to it for good."""
    _call("setns", ctypes.c_int(descriptor), ctypes.c_int(0))


def make_mounts_private() -> None:
    """From here on nothing mounted by this process is seen by anybody else."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def mount_proc() -> None:
    """Show the processes of this process namespace under /proc. May be refused inside containers: OSError."""
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def bind_file(source: Path, target: Path) -> None:
    _mount(str(source), str(target), None, _MS_BIND)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    def text(value: str | None) -> ctypes.c_char_p:
        return ctypes.c_char_p(None if value is None else os.fsencode(value))

    _call("mount", text(source), text(target), text(kind), ctypes.c_ulong(flags), ctypes.c_void_p(None))


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[name](*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
