"""The supervisor: the one process that holds a lab together.

`Lab` starts `python -m stretto.lab.supervisor`, which enters fresh namespaces and forks. The child is process 1 of a new
process namespace and does all the work: it builds the network, starts commands in the hosts, slows them, answers on a
private socket to the `Lab` and on a named one to `stretto lab cut`. The parent only waits for it.

    Lab (any process) --- socket ---> process 1 --- fork, exec ---> the commands

Nothing outlives it, by construction:
  - when process 1 ends, however it ends, the kernel kills every process of its namespace, daemons included;
  - process 1 ends when the `Lab` closes the socket, when the process that made the `Lab` is gone (a pidfd tells,
    whatever copies of the socket its forks may hold), or when its parent is gone (a signal from the kernel);
  - the network namespaces, with bridge, cables and token buckets, end with the last process in them.

One thread, one loop, nothing in it blocks.
"""

from __future__ import annotations

import argparse
import os
import selectors
import shutil
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from stretto.errors import ConfigurationError
from stretto.lab import messages, namespaces
from stretto.lab.children import Children
from stretto.lab.messages import CutHost, Restore, SetRate, SetSlow, Signal, Spawn
from stretto.lab.network import Network, address, host_name
from stretto.lab.slow import DutyCycle
from stretto.launching.supervisor import PR_SET_PDEATHSIG, prctl

_HOSTS_FILE = Path("/etc/hosts")
_FIRST_REQUEST_S = 10.0


class LabSupervisor:
    """Process 1. `serve` returns when the lab is over."""

    def __init__(self, control: socket.socket, listener: socket.socket, maker: int, directory: Path) -> None:
        self._control = control
        self._directory = directory
        self._outer_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        self._own_proc = _private_mounts()
        self._network: Network | None = None
        self._children = Children([], self._own_proc)
        self._cycles: dict[int, DutyCycle] = {}
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._selector.register(maker, selectors.EVENT_READ, self._on_maker_gone)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._on_stranger(listener))
        self._watch_children()

    def serve(self) -> None:
        while not self._over:
            now = time.monotonic()
            for key, _ in self._selector.select(self._turn_cycles(now)):
                key.data()
        shutil.rmtree(self._directory, ignore_errors=True)  # the lab's maker may be gone and cannot do it

    def _watch_children(self) -> None:
        ours, kernels = socket.socketpair()
        for end in (ours, kernels):
            end.setblocking(False)
        signal.set_wakeup_fd(kernels.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to hear
        self._wakeup = ours, kernels
        self._selector.register(ours, selectors.EVENT_READ, self._on_children)

    def _on_children(self) -> None:
        with suppress(BlockingIOError):
            self._wakeup[0].recv(4096)
        for process, code in self._children.bury():
            self._tell(messages.Exited(process, code))

    def _on_maker_gone(self) -> None:
        self._over = True

    def _on_control(self) -> None:
        received = messages.receive(self._control, messages.ENVELOPE)
        if received is None:
            self._over = True
            return
        envelope, descriptors = received
        try:
            self._tell(self._answer(envelope.id, envelope.request, descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _tell(self, message: messages.FromSupervisor) -> None:
        try:
            messages.send(self._control, message)
        except OSError:
            self._over = True

    def _on_stranger(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_link_request(connection))

    def _on_link_request(self, connection: socket.socket) -> None:
        """One packet, one answer, and goodbye: whatever else comes is not read."""
        self._selector.unregister(connection)
        with connection, suppress(OSError):
            try:
                received = messages.receive(connection, messages.LINK_ENVELOPE)
            except msgspec.DecodeError as error:
                messages.send(connection, messages.RequestFailed(0, f"not a request to a lab: {error}"))
                return
            if received is not None:
                envelope, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                messages.send(connection, self._answer(envelope.id, envelope.request, []))

    def _answer(self, id: int, request: messages.Request, descriptors: list[int]) -> messages.Reply:
        try:
            return self._act(id, request, descriptors)
        except ConfigurationError as error:
            return messages.RequestFailed(id, str(error), configuration=True)
        except Exception as error:  # the one who asked is told; the lab goes on
            return messages.RequestFailed(id, f"{type(request).__name__} failed: {error!r}")

    def _act(self, id: int, request: messages.Request, descriptors: list[int]) -> messages.Reply:
        if isinstance(request, messages.Setup):
            self._set_up(request)
            return messages.Done(id)
        network = self._built()
        match request:
            case Spawn(host=host, service=service):
                self._check(host)
                process = self._children.start(host, messages.read_command(descriptors[0]), descriptors[1:], service)
                return messages.Spawned(id, process, self._outer_pid(process))
            case Signal(process=process, signum=signum):
                self._children.signal(process, signum)
            case CutHost(host=host):
                network.cut(self._check(host))
            case Restore(host=host):
                network.restore(self._check(host))
            case SetRate(host=host, rate=rate):
                network.set_rate(self._check(host), rate)
            case SetSlow(host=host, factor=factor):
                self._set_slow(self._check(host), factor)
            case messages.Count():
                return messages.Counted(id, network.counters())
        return messages.Done(id)

    def _set_up(self, setup: messages.Setup) -> None:
        named = _name_hosts(len(setup.rates), self._directory)
        self._network = Network(setup.rates, named)
        self._children = Children(self._network.hosts, self._own_proc)
        for host, factor in enumerate(setup.slow):
            self._set_slow(host, factor)

    def _built(self) -> Network:
        if self._network is None:
            raise ConfigurationError("the lab has no hosts yet: the first request must be Setup")
        return self._network

    def _check(self, host: int) -> int:
        last = len(self._built().hosts) - 1
        if not 0 <= host <= last:
            raise ConfigurationError(f"there is no host {host} in this lab. Name one from 0 to {last}.")
        return host

    def _outer_pid(self, process: int) -> int:
        """What the world outside calls a child: read before it is buried, from the /proc of outside."""
        handle = os.pidfd_open(process)
        try:
            path = f"self/fdinfo/{handle}"
            with open(os.open(path, os.O_RDONLY, dir_fd=self._outer_proc)) as info:
                return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))
        finally:
            os.close(handle)

    def _set_slow(self, host: int, factor: float) -> None:
        if self._cycles.pop(host, None) is not None:
            self._children.pause(host, running=True)
        if factor != 1.0:
            self._cycles[host] = DutyCycle(factor, time.monotonic())

    def _turn_cycles(self, now: float) -> float | None:
        """Stop and continue slow hosts as due; seconds until the next turn, None when none is to come."""
        for host, cycle in self._cycles.items():
            if now >= cycle.due:
                running = cycle.turn(now)
                if self._children.busy(host):
                    self._children.pause(host, running)
        waits = [cycle.due - now for cycle in self._cycles.values()]
        return max(0.0, min(waits)) if waits else None


def _private_mounts() -> bool:
    """Show the lab's own processes in /proc. False where a container refuses that: the rest works without."""
    try:
        namespaces.make_mounts_private()
        namespaces.mount_proc()
        return True
    except OSError:
        return False


def _name_hosts(count: int, directory: Path) -> bool:
    """Make host0, host1, ... resolve inside the lab. False, and no host gets a name, where that cannot be done."""
    lines = [f"{address(host)} {host_name(host)}" for host in range(count)]
    # As a socket for both protocols shows a peer: without, torch's store warns that its client has no name.
    lines += [f"::ffff:{address(host)} {host_name(host)}.lab" for host in range(count)]
    private = directory / "hosts"
    try:
        private.write_text("\n".join([_HOSTS_FILE.read_text(), *lines]) + "\n")
        private.chmod(0o644)
        namespaces.bind_file(private, _HOSTS_FILE)
        private.unlink()  # the mount keeps it
        return True
    except OSError:
        return False


def _refuse(control: socket.socket, why: str) -> None:
    """Answer the first request, which waits for a lab that will not be. No other comes before an answer."""
    control.settimeout(_FIRST_REQUEST_S)
    received = messages.receive(control, messages.ENVELOPE)
    if received is not None:
        messages.send(control, messages.RequestFailed(received[0].id, why))


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by stretto.lab.Lab; not for use by hand.")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--maker", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    control = socket.socket(fileno=arguments.control)
    listener = socket.socket(fileno=arguments.listener)
    maker = os.pidfd_open(arguments.maker)
    if os.getppid() != arguments.maker:
        return
    try:
        namespaces.enter_private()
    except namespaces.NamespacesRefused as refused:
        _refuse(control, str(refused))
        return
    child = os.fork()
    if child:
        control.close()
        listener.close()
        os.waitpid(child, 0)
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    LabSupervisor(control, listener, maker, arguments.directory).serve()


if __name__ == "__main__":
    main()
