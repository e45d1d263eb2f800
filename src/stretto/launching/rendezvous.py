"""Under launchers that are not ours: somebody starts the coordinator, and all learn its address and the secret.

`stretto run` gives its workers both. The others do not, so rank 0 starts the coordinator, and the two facts travel:

    the address     torchrun: through its own store, the one that its agent serves or one that rank 0 opens at
                    MASTER_ADDR:MASTER_PORT as torch would. Slurm, MPI: it is known beforehand (detect.py).
    the secret      On one host rank 0 leaves it in a file that only this user can read, until the workers have met. Across
                    machines the user gives it (detect.py insists). Whoever can reach torchrun's store can read and write
                    there, so a secret goes through it in one case only: between machines whose network was declared trusted
                    (STRETTO_ENCRYPT=off), where it tells this job from others and keeps out nobody.

The coordinator is a child of rank 0 and dies with it. Every wait here ends at `timeouts.meet_s`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stretto.errors import JobError, RendezvousError, SecretError
from stretto.launching import coordinator_process
from stretto.launching import secret as secrets
from stretto.launching.coordinator import why_unreachable
from stretto.launching.detect import Launch
from stretto.launching.hosts import (
    address_for_others,
    address_of,
    interface_of,
    join_address,
    split_address,
)
from stretto.launching.peers import ranks_text
from stretto.timeouts import Timeouts

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

POLL_S = 0.05
MAX_BYTES = 4096  # of what others left for us to read
T = TypeVar("T")

log = logging.getLogger("stretto.launching")


def find_rendezvous(launch: Launch, timeouts: Timeouts) -> Launch:
    """Fill in the rendezvous and the secret, starting the coordinator where that is ours to do. Collective: every
    worker of the job calls it, before `local_address` and `introduce`. A job of one and a job of `stretto run` are
    settled already."""
    if launch.world_size == 1 or launch.launcher in ("stretto", "store"):
        return launch
    if launch.launcher == "torchrun":
        return _through_torch_store(launch, timeouts)
    return _at_known_address(launch, timeouts)


def local_address(launch: Launch) -> tuple[str, str]:
    """(ip, interface) on which this worker listens and which it publishes: STRETTO_INTERFACE if set; loopback if all
    workers share this host; else the address from which the kernel talks to the rendezvous."""
    if launch.interface is not None:
        ip = address_of(launch.interface)
    elif launch.one_host:
        ip = "127.0.0.1"
    else:
        ip = _address_for_others(launch)
    return ip, interface_of(ip) or "unknown"


def _address_for_others(launch: Launch) -> str:
    where = launch.rendezvous or launch.master
    if where is None:
        raise JobError(
            f"rank {launch.rank} of {launch.world_size} does not know the rendezvous yet, so it cannot choose an "
            "address. Call find_rendezvous(launch, timeouts) first."
        )
    return address_for_others(*split_address(where))


# Slurm and MPI


def _at_known_address(launch: Launch, timeouts: Timeouts) -> Launch:
    deadline = time.monotonic() + timeouts.meet_s
    if launch.rendezvous is None:
        raise JobError(f"{launch.launcher}: a job of {launch.world_size} without a rendezvous; build Launch with detect().")
    host, port = split_address(launch.rendezvous)
    secret = launch.secret
    if launch.rank == 0:
        if secret is None:
            secret = secrets.generate()
            _write_secret(launch, secret)
        # Several hosts: the name may mean a loopback address on its own host (/etc/hosts), so listen on all; the door
        # is shut
        # to strangers anyway.
        bind = host if launch.one_host else ("::" if ":" in host else "0.0.0.0")
        start_coordinator(join_address(bind, port), launch.world_size, secret, launch.encrypt, deadline)
    elif secret is None:
        secret = _read_secret(launch, deadline)
    return dataclasses.replace(launch, secret=secret)


class _Left(msgspec.Struct, frozen=True):
    """What rank 0 leaves in the file."""

    pid: int
    secret: str

    def __repr__(self) -> str:
        return f"_Left(pid={self.pid})"


def forget_secret(launch: Launch) -> None:
    """Remove the file of a one-host job: everybody has met. Called by rank 0, harmless otherwise."""
    if launch.rank == 0 and launch.world_size > 1 and launch.launcher != "stretto":
        with contextlib.suppress(OSError, JobError):
            _secret_path(launch).unlink()


def _secret_path(launch: Launch) -> Path:
    """In a folder that only we can enter: refused if another user made it first."""
    folder = Path(tempfile.gettempdir()) / f"stretto-job-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SecretError(
            f"The workers of this host would share their secret in {folder}, but that is not a folder of user "
            f"{os.getuid()} alone (mode 700).\n"
            f"Remove it, or give the job a secret. {secrets.HOW_TO_MAKE_ONE}"
        )
    place = launch.rendezvous if launch.master is None else launch.master  # the latter does not change when a job is settled
    name = hashlib.sha256(f"{launch.launcher}\0{launch.run}\0{place}".encode()).hexdigest()[:24]
    return folder / name


def _write_secret(launch: Launch, secret: bytes) -> None:
    path = _secret_path(launch)
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # mode 600
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(_Left(os.getpid(), secret.hex())))
    os.replace(temporary, path)  # readers see the old file or all of the new one


def _read_secret(launch: Launch, deadline: float) -> bytes:
    path = _secret_path(launch)

    def read() -> bytes | None:
        try:
            with path.open("rb") as file:
                left = msgspec.json.decode(file.read(MAX_BYTES), type=_Left)
            os.kill(left.pid, 0)  # a file whose writer is dead is of an earlier job
            return secrets.parse(left.secret, str(path))
        except (OSError, OverflowError, msgspec.MsgspecError):
            return None

    secret = _poll(read, deadline)
    if secret is None:
        raise SecretError(
            f"rank {launch.rank} waited for rank 0 to leave the job's secret in {path}, but it never appeared: rank 0 "
            "failed, or it has another /tmp (containers).\n"
            f"Read rank 0's output, or give the job a secret. {secrets.HOW_TO_MAKE_ONE}"
        )
    return secret


# torchrun


class _Meeting(msgspec.Struct, frozen=True):
    """What rank 0 puts into torchrun's store."""

    rendezvous: str
    secret_given: bool  # rank 0 has its secret from the environment, so the others must too
    secret: str = ""  # only where `_store_may_carry_secret`

    def __repr__(self) -> str:
        return f"_Meeting(rendezvous={self.rendezvous!r}, secret_given={self.secret_given})"


def _store_may_carry_secret(launch: Launch) -> bool:
    return not launch.one_host and not launch.encrypt


def _through_torch_store(launch: Launch, timeouts: Timeouts) -> Launch:
    deadline = time.monotonic() + timeouts.meet_s
    key = f"stretto/{launch.run}/{launch.world_size}"
    try:
        store = _open_store(launch, timeouts)
        if launch.rank == 0:
            return publish(launch, store, key, deadline)
        return learn(launch, store, key, deadline)
    except RuntimeError as error:  # torch's DistError and its kin
        raise RendezvousError(
            f"rank {launch.rank} cannot use the store at {launch.master} (MASTER_ADDR:MASTER_PORT): "
            f"{str(error).splitlines()[0]}.\n"
            "Check that rank 0's host is up and that the port is open between the machines."
        ) from error


def _open_store(launch: Launch, timeouts: Timeouts) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # the one place in launching/ that needs torch

    assert launch.master is not None  # detect() requires it
    host, port = split_address(launch.master)
    # wait_for_workers would count us in torch's own rendezvous; multi_tenant lets torch open "its" store on the same
    # port.
    hosting = launch.rank == 0 and not launch.agent_store
    return TCPStore(
        host_name=host, port=port, world_size=None, is_master=hosting, timeout=timedelta(seconds=timeouts.meet_s),
        wait_for_workers=False, multi_tenant=not launch.agent_store,
    )  # fmt: skip


def publish(launch: Launch, store: Store, key: str, deadline: float) -> Launch:
    """Start the coordinator, and say in the store where it is. On rank 0."""
    secret = launch.secret or secrets.generate()
    if launch.secret is None and not _store_may_carry_secret(launch):
        _write_secret(launch, secret)  # detect() has made sure that this is one host
    ip, _ = local_address(launch)
    rendezvous = start_coordinator(join_address(ip, 0), launch.world_size, secret, launch.encrypt, deadline)
    travels = secret.hex() if launch.secret is None and _store_may_carry_secret(launch) else ""
    store.set(key, msgspec.json.encode(_Meeting(rendezvous, launch.secret is not None, travels)).decode())
    if not launch.agent_store:
        _wait_for_readers(launch, store, key, deadline)
    return dataclasses.replace(launch, rendezvous=rendezvous, secret=secret)


def _wait_for_readers(launch: Launch, store: Store, key: str, deadline: float) -> None:
    """A store that rank 0 serves must stay until the last worker has read it."""

    def missing() -> list[int]:
        return [rank for rank in range(1, launch.world_size) if not store.check([f"{key}/read/{rank}"])]

    if _poll(lambda: True if not missing() else None, deadline) is None:
        raise JobError(
            f"{ranks_text(missing()).capitalize()} of {launch.world_size} did not come to the store at {launch.master} "
            "in time.\n"
            "Read the output of the missing workers; MASTER_ADDR must be an address of rank 0's host that they can "
            "reach."
        )


def learn(launch: Launch, store: Store, key: str, deadline: float) -> Launch:
    """Wait until rank 0 has said where its coordinator listens.

    torch's store has no way to ask how long a value is or to read a part of it, so whoever can write to it can make us read a
    value of any length. What is longer than `MAX_BYTES` is thrown away undecoded; the store itself has to be kept from strangers.
    """

    def read() -> _Meeting | None:
        if not store.check([key]):
            return None
        try:
            value = store.get(key)
            if len(value) > MAX_BYTES:
                return None
            found = msgspec.json.decode(value, type=_Meeting)
        except msgspec.MsgspecError:
            return None  # a stranger's; rank 0 may still come
        # The agent's store outlives a restart of the workers: an address that does not answer is of the last
        # coordinator.
        return found if why_unreachable(found.rendezvous, 1.0) is None else None

    found = _poll(read, deadline)
    if found is None:
        raise RendezvousError(
            f"rank {launch.rank} waited at the store {launch.master} for rank 0 to say where its coordinator listens, "
            "but no coordinator that answers was named in time.\n"
            "Read rank 0's output, and check that this host can reach rank 0's."
        )
    store.set(f"{key}/read/{launch.rank}", "1")
    return dataclasses.replace(launch, rendezvous=found.rendezvous, secret=_agreed_secret(launch, found, deadline))


def _agreed_secret(launch: Launch, found: _Meeting, deadline: float) -> bytes:
    """Ours to decide, not the store's: what it says is not believed where it may not carry a secret."""
    if launch.secret is not None:
        return launch.secret
    if found.secret_given:
        raise SecretError(
            f"rank 0 was given a secret by its environment, rank {launch.rank} was not, so it cannot join.\n"
            "Export the same STRETTO_SECRET or STRETTO_SECRET_FILE on every machine, or on none."
        )
    if _store_may_carry_secret(launch):
        return secrets.parse(found.secret, "torchrun's store")
    return _read_secret(launch, deadline)


def _poll(attempt: Callable[[], T | None], deadline: float) -> T | None:
    while (found := attempt()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found


# The coordinator as a child


def start_coordinator(
    bind: str, world_size: int, secret: bytes, encrypted: bool, deadline: float, *, outlives: bool = False, room: int = 0
) -> str:
    """Start the coordinator as a child of this process and return the address at which it listens.

    `outlives`: it goes on when this process dies, for as long as somebody watches (`lasting_membership.py`), and there is `room`
    for so many members that join later."""
    if outlives:
        process, address = coordinator_process.start(
            bind, world_size, secret, os.environ, encrypted=encrypted, deadline=deadline,
            options=["--lasting-without-parent", "--room", str(room)],
        )  # fmt: skip
        threading.Thread(target=process.wait, name="stretto-coordinator", daemon=True).start()
        return address
    # Linux sends the death signal when the *thread* that made the child ends; other threads rely on the child's own look.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    process, address = coordinator_process.start(
        bind, world_size, secret, os.environ, encrypted=encrypted, deadline=deadline, parent=parent, stderr=subprocess.PIPE
    )
    # Whoever waits for a child keeps it from becoming a zombie; the thread also passes on what the child has to say.
    threading.Thread(target=_attend, args=(process,), name="stretto-coordinator", daemon=True).start()
    return address


def _attend(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None
    # Raw reads and writes: a buffered stream's lock in a daemon thread can stall the interpreter's exit.
    while chunk := os.read(process.stderr.fileno(), 65536):
        os.write(2, chunk)
    process.wait()
    process.stderr.close()
