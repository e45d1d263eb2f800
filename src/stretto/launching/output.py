"""From the bytes workers write to lines a person can read: one owner per line, its rank in front, nothing torn.

`Lines` cuts one stream of one worker into prefixed lines, with no input or output of its own:
- a line is passed on when its newline has come; text without one is held, and passed on after `HOLD_S` of waiting (so
  that a prompt shows) or at the end of the stream;
- a progress bar redraws its line with carriage returns; only its state at a newline, and every `HOLD_S`, is
  passed on;
- a line longer than `LONGEST` bytes is cut, between characters; bytes that are not UTF-8 come out as U+FFFD.
Floods are cheap: whole chunks are prefixed with one `bytes.replace`.

`Screen` is the one writer of the launcher's own stdout and stderr, in a thread: a consumer that stops reading
(`| less`) must not keep the launcher from noticing that a worker died. When its backlog passes `BACKLOG` the launcher
stops reading workers, and the pipes push back on them. On a terminal it also keeps one status line at the bottom.

A reader that has gone (`| head`) is one thing: nobody wants more output, and `broken` says so. A disk that is full, or a
terminal that was closed over a job that ignores SIGHUP, is another: the job is not at fault and goes on. What cannot be
written is lost, the other stream says so, and once writing works again the gap is marked.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

HOLD_S = 1.0
LONGEST = 1 << 16
BACKLOG = 8 << 20
STDOUT, STDERR = 1, 2
COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)  # ANSI foregrounds that read on light and dark grounds


def prefix_of(name: str, width: int, colour: int | None) -> bytes:
    """`[ 3] `, in the colour of that rank (`colour` counts round `COLOURS`) or plain."""
    text = f"[{name.rjust(width)}]"
    if colour is None:
        return f"{text} ".encode()
    return f"\x1b[{COLOURS[colour % len(COLOURS)]}m{text}\x1b[0m ".encode()


def wants_colour(stream: IO[Any], environ: Mapping[str, str]) -> bool:
    """A terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


@dataclass(slots=True)
class Lines:
    """One stream of one worker. Every method returns the finished, prefixed lines as bytes (often none)."""

    prefix: bytes
    held: bytes = b""
    held_since: float = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        if not self.held:
            self.held_since = now
        complete, newline, rest = (self.held + data).rpartition(b"\n")
        if newline:
            self.held_since = now
        self.held = self._latest(rest)
        out = self._dress(complete + newline) if newline else b""
        while len(self.held) > LONGEST:
            piece, self.held = self._cut(self.held)
            out += self._dress(piece + b"\n")
        return out

    def overdue(self, now: float) -> bytes:
        """What has waited too long for its newline."""
        if not self.held or now - self.held_since < HOLD_S:
            return b""
        return self.close()

    def close(self) -> bytes:
        text, self.held = self.held.rstrip(b"\r"), b""
        return self._dress(text + b"\n") if text else b""

    def _latest(self, rest: bytes) -> bytes:
        """The last drawing of an unfinished line, the only one that matters (a final \\r may belong to \\r\\n)."""
        drawings = rest[:-1].rpartition(b"\r")
        return drawings[2] + rest[-1:] if drawings[1] else rest

    def _cut(self, text: bytes) -> tuple[bytes, bytes]:
        at = LONGEST
        while at > LONGEST - 4 and text[at] & 0xC0 == 0x80:  # a continuation byte: its character began before
            at -= 1
        return text[:at], text[at:]

    def _dress(self, text: bytes) -> bytes:
        """Whole lines -> prefixed lines of valid UTF-8."""
        if b"\r" in text:
            text = b"".join(line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in text.split(b"\n")[:-1])
        try:
            text.decode()
        except UnicodeDecodeError:
            text = text.decode("utf-8", "replace").encode()
        return self.prefix + text[:-1].replace(b"\n", b"\n" + self.prefix) + b"\n"


@dataclass(slots=True)
class Screen:
    """Writes blocks to stdout (1) or stderr (2) in the order given. `status` draws the live line; None: no terminal."""

    status: Callable[[], str] | None = None
    broken: bool = False  # the reader of our output has gone (`| head`)
    lost: dict[int, int] = field(default_factory=dict)  # stream -> bytes that could not be written, while that is so
    _waiting: queue.Queue[tuple[int, bytes] | None] = field(default_factory=queue.Queue)
    _backlog: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _draw: Callable[[str], bytes] | None = None

    def start(self) -> None:
        if self.status is not None:
            self._draw = status_line()
        self._thread = threading.Thread(target=self._write_all, name="stretto-screen", daemon=True)
        self._thread.start()

    @property
    def congested(self) -> bool:
        return self._backlog > BACKLOG

    def write(self, target: int, block: bytes) -> None:
        if block:
            with self._lock:
                self._backlog += len(block)
            self._waiting.put((target, block))

    def close(self, give_up: Callable[[], bool]) -> None:
        """Write all that was handed over: as by any program, a paused reader is waited for, until `give_up()`."""
        self._waiting.put(None)
        while self._thread is not None and self._thread.is_alive() and not give_up():
            self._thread.join(0.2)

    def _write_all(self) -> None:
        erase = b""
        while True:
            try:
                item = self._waiting.get(timeout=1.0 if self.status is not None else None)
            except queue.Empty:
                item = (STDERR, b"")  # time to redraw the clock
            if item is None:
                self._put(STDERR, erase)
                return
            target, block = item
            if erase:
                self._put(STDERR, erase)  # same terminal: stderr's erase comes before stdout's text
            self._put(target, block)
            with self._lock:
                self._backlog -= len(block)
            if self._draw is not None and self.status is not None and self._waiting.empty():
                self._put(STDERR, self._draw(self.status()))
                erase = b"\r\x1b[2K"
            else:
                erase = b""

    def _put(self, target: int, data: bytes) -> None:
        """All of it, to the descriptor itself; nowhere once the reader has gone."""
        if not data or self.broken:
            return
        lost = self.lost.get(target, 0)
        problem = _write_fully(target, _gap(lost) + data)
        if problem is None:
            self.lost.pop(target, None)
        elif problem.errno in (errno.EPIPE, errno.ECONNRESET):
            self.broken = True
        else:
            self.lost[target] = lost + len(data)
            if not lost:
                _write_fully(STDOUT + STDERR - target, _cannot_be_written(target, problem))


def _write_fully(target: int, data: bytes) -> OSError | None:
    """The problem that kept it from being written, or the rest of it."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # somebody made our terminal non-blocking
            threading.Event().wait(0.01)
        except OSError as problem:
            return problem
    return None


def _cannot_be_written(target: int, problem: OSError) -> bytes:
    stream = "standard output" if target == STDOUT else "standard error"
    return f"stretto: {stream} cannot be written ({problem.strerror}); the job goes on, and this output is lost\n".encode()


def _gap(lost: int) -> bytes:
    return b"" if not lost else b"\nstretto: some output (%d bytes) could not be written and is missing here\n" % lost


def status_line() -> Callable[[str], bytes]:
    """A function that renders the status text for this terminal: its width, its colours, no newline."""
    from rich.console import Console  # only on a terminal: it costs 50 ms
    from rich.text import Text

    console = Console(stderr=True)

    def draw(status: str) -> bytes:
        text = Text(status, style="dim")
        text.truncate(max(1, console.width - 1), overflow="ellipsis")
        with console.capture() as capture:
            console.print(text, end="", soft_wrap=True)
        return capture.get().encode()

    return draw
