"""The `Lab`'s end of the line to its supervisor: requests with answers, and the output and end of every process.

One thread reads everything: answers, `Exited` events and the pipes of the commands. Callers send under a lock and
wait, with a deadline, for the thread to bring what they asked for. When the supervisor is gone, everything that waits
fails at once.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from stretto.errors import ConfigurationError, JobError
from stretto.lab import messages


class Sink(Protocol):
    """Receives output as it comes. Called from the lab's reading thread: must not block. `number`: which process of its job."""

    def write(self, number: int, data: bytes) -> None: ...

    @property
    def congested(self) -> bool:
        """True: read no output for now. Commands then wait in their own `write`, as for a slow terminal."""


KEPT_BYTES = 16 * 2**20
_ANSWER_S = 20.0
_LAST_OUTPUT_S = 1.0
_CONGESTED_S = 0.02


class LabProcess:
    """A command on a host. `output` is what it wrote to stdout and stderr so far (of very long output: the end)."""

    def __init__(self, link: LabConnection, host: int, pipe: int, sink: Sink | None, number: int) -> None:
        self.host = host
        self.number = number  # among the processes of its job: a worker's rank
        self.pid = -1  # as seen from outside the lab: os.kill(process.pid, ...) reaches it
        self.returncode: int | None = None  # negative: ended by that signal
        self.ended_at = 0.0
        self._inner = -1
        self._link = link
        self._pipe = pipe
        self._open = True
        self._sink = sink
        self._kept = bytearray()

    @property
    def output(self) -> str:
        with self._link.changed:
            return self._kept.decode(errors="replace")

    @property
    def finished(self) -> bool:
        """Ended, and its output is in. A daemon that holds the pipe open is not waited for longer than a second."""
        if self.returncode is None:
            return False
        return not self._open or time.monotonic() > self.ended_at + _LAST_OUTPUT_S

    def wait(self, timeout_s: float) -> int:
        """The return code, or `JobError` when the process has not ended in time. It goes on running then."""
        self._link.wait_for(lambda: self.finished, timeout_s)
        if self.returncode is None:
            raise JobError(f"process {self.pid} on host {self.host} has not ended within {timeout_s:g} s. It still runs.")
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """To the command and everything in its process group. No error when it has ended."""
        if self.returncode is None:
            self._link.request(messages.Signal(self._inner, int(signum)))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _feed(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * KEPT_BYTES:
            del self._kept[:-KEPT_BYTES]


class LabConnection:
    def __init__(self, sock: socket.socket) -> None:
        self.changed = threading.Condition()
        self._sock = sock
        self._sending = threading.Lock()
        self._last_id = 0
        self._asked: dict[int, tuple[Future[messages.Reply], LabProcess | None]] = {}  # and the process that is to be born
        self._processes: dict[int, LabProcess] = {}
        self._lost: str | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._read_all, name="stretto-lab", daemon=True)
        self._thread.start()

    def request(
        self, request: messages.Request, descriptors: Sequence[int] = (), process: LabProcess | None = None
    ) -> messages.Reply:
        """Ask and wait for the answer; a refusal is raised. `process`: what a `Spawn` starts."""
        answer: Future[messages.Reply] = Future()
        with self.changed:
            if self._lost is not None:
                raise JobError(self._lost)
            self._last_id = id = self._last_id + 1
            self._asked[id] = answer, process
        try:
            with self._sending, suppress(BrokenPipeError, ConnectionResetError):  # the thread that reads says what has happened
                messages.send(self._sock, messages.NumberedRequest(id, request), descriptors)
            reply = answer.result(_ANSWER_S)
        except TimeoutError:
            what = type(request).__name__
            raise JobError(f"the lab did not answer {what} within {_ANSWER_S:g} s: the machine is overloaded.") from None
        except OSError as error:
            raise JobError(f"the lab has ended: {error}") from error
        finally:
            with self.changed:
                self._asked.pop(id, None)
        if isinstance(reply, messages.RequestFailed):
            raise (ConfigurationError if reply.configuration else JobError)(reply.message)
        return reply

    def start(self, request: messages.Spawn, command: int, extra: Sequence[int], sink: Sink | None, number: int) -> LabProcess:
        """Start a process: `command` is the file that says which, `extra` become its descriptors 3, 4, ..."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        process = LabProcess(self, request.host, reading, sink, number)
        try:
            self.request(request, [command, writing, *extra], process)
        finally:
            os.close(writing)
            if process.pid < 0:
                os.close(reading)  # never born: nobody else will
        return process

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the condition holds, the time is over or the supervisor is gone (an error)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not condition():
                if self._lost is not None:
                    raise JobError(self._lost)
                left = 0.25 if deadline is None else min(0.25, deadline - time.monotonic())
                if left <= 0:
                    return False
                self.changed.wait(left)  # in slices: `finished` also depends on the clock
            return True

    def close(self) -> None:
        """Closing the socket is what ends the supervisor, and with it every process of the lab."""
        self._closing = True
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        self._sock.close()
        self._selector.close()

    def _read_all(self) -> None:
        try:
            while not self._lost:
                held_back = 0
                ready = self._selector.select()
                for key, _ in ready:
                    if key.data is None:
                        self._on_message()
                    elif key.data._sink is not None and key.data._sink.congested:
                        held_back += 1
                    else:
                        self._on_output(key.data)
                if held_back == len(ready):
                    time.sleep(_CONGESTED_S)  # their pipes stay readable: do not spin on them
        except Exception as error:  # whoever waits must hear of it
            self._end(f"the lab can no longer be read: {error!r}")
        finally:
            self._drop_pipes()

    def _on_message(self) -> None:
        try:
            received = messages.receive(self._sock, messages.FROM_SUPERVISOR)
        except ConnectionResetError:  # it died with a request unread
            received = None
        if received is None:
            self._end(
                "the lab is closed." if self._closing else "the lab's supervisor process has died, and all its hosts with it."
            )
            return
        message = received[0]
        with self.changed:
            if isinstance(message, messages.Exited):
                self._on_exit(message)
            elif message.id in self._asked:
                answer, process = self._asked[message.id]
                if isinstance(message, messages.Spawned) and process is not None:
                    self._on_birth(message, process)
                answer.set_result(message)
            self.changed.notify_all()

    def _on_birth(self, message: messages.Spawned, process: LabProcess) -> None:
        process.pid, process._inner = message.pid, message.process
        self._processes[message.process] = process
        self._selector.register(process._pipe, selectors.EVENT_READ, process)

    def _on_exit(self, message: messages.Exited) -> None:
        process = self._processes.pop(message.process, None)
        if process is not None:
            process.ended_at = time.monotonic()
            process.returncode = message.returncode

    def _on_output(self, process: LabProcess) -> None:
        try:
            data = os.read(process._pipe, 1 << 16)
        except BlockingIOError:
            return
        if data and process._sink is not None:
            process._sink.write(process.number, data)
        with self.changed:
            if data:
                process._feed(data)
            else:
                self._drop_pipe(process)
            self.changed.notify_all()

    def _drop_pipe(self, process: LabProcess) -> None:
        self._selector.unregister(process._pipe)
        os.close(process._pipe)
        process._open = False

    def _drop_pipes(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._drop_pipe(key.data)

    def _end(self, reason: str) -> None:
        with self.changed:
            self._lost = self._lost or reason
            for process in self._processes.values():
                process.ended_at, process.returncode = time.monotonic(), -signal.SIGKILL
            self._processes.clear()
            for answer, _ in self._asked.values():
                if not answer.done():
                    answer.set_exception(JobError(self._lost))
            self.changed.notify_all()
