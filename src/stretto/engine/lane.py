"""The compression thread: it carries buckets through their exchanges, so that encoding overlaps backward and the wire.

An exchange is a generator that yields collectives under way and is resumed when they are done. One thread advances all of them,
in the order in which they become ready, so one bucket is encoded while others travel; the first steps are taken in the order of
submission. On a GPU the steps are queued on a stream of the thread's own, after whatever the submitting stream had queued.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator

import torch

from stretto.collectives.request import Pending
from stretto.errors import StrettoError

STOP_S = 5.0
Course = Generator[Pending, None, None]


class Errand:
    """One generator on its way."""

    def __init__(self, course: Course, device: torch.device) -> None:
        self.course = course
        self.device = device
        self.error: BaseException | None = None
        self.waits_for: Pending | None = None
        self.submitted: torch.cuda.Event | None = None
        self.finished: torch.cuda.Event | None = None
        self._done = threading.Event()
        if device.type == "cuda":
            self.submitted = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Return when it has ended; raise what went wrong. Every collective has a deadline, and `stop` ends the rest."""
        while not self._done.wait(1.0):
            pass
        if self.error is not None:
            raise self.error
        if self.finished is not None:
            torch.cuda.current_stream(self.device).wait_event(self.finished)

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    def end(self, error: BaseException | None) -> None:
        self.error = error
        self._done.set()


class Lane:
    """A thread that runs errands. It ends with `stop`, or when nobody holds on to the lane any more."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=_run, args=(self._ready,), name="stretto-compression", daemon=True)
        self._thread.start()

    def submit(self, course: Course, device: torch.device) -> Errand:
        errand = Errand(course, device)
        with self._lock:
            if self._stopped:
                errand.end(_shut_down())
            else:
                self._ready.put(errand)
        return errand

    def stop(self) -> None:
        """End the thread; errands under way, and later ones, fail. Waits until it has let go of what it was doing."""
        with self._lock:
            stopped, self._stopped = self._stopped, True
            if not stopped:
                self._ready.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)

    def __del__(self) -> None:
        self._ready.put(None)  # not `stop`: whoever collects garbage must not wait


def _shut_down() -> StrettoError:
    return StrettoError("the job was shut down: gradients can no longer be combined.")


def _run(ready: queue.SimpleQueue[Errand | None]) -> None:
    streams: dict[torch.device, torch.cuda.Stream] = {}
    under_way: set[Errand] = set()
    while _take_step(ready, streams, under_way):
        pass
    while not ready.empty():
        under_way |= {left for left in [ready.get()] if left is not None}
    for errand in under_way:
        if not errand.ended:
            errand.end(_shut_down())


def _take_step(
    ready: queue.SimpleQueue[Errand | None], streams: dict[torch.device, torch.cuda.Stream], under_way: set[Errand]
) -> bool:
    """Of the next errand that is ready, if there is one to come. A function, so that a thread that waits holds none."""
    errand = ready.get()
    if errand is None:
        return False
    with _stream_of(errand, streams):
        _advance(errand, ready)
    (under_way.discard if errand.ended else under_way.add)(errand)
    return True


def _stream_of(errand: Errand, streams: dict[torch.device, torch.cuda.Stream]) -> contextlib.AbstractContextManager[object]:
    if errand.device.type != "cuda":
        return contextlib.nullcontext()
    if errand.device not in streams:
        streams[errand.device] = torch.cuda.Stream(errand.device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(streams[errand.device])


def _advance(errand: Errand, ready: queue.SimpleQueue[Errand | None]) -> None:
    """On to the next collective, or to the end."""
    try:
        if errand.submitted is not None:
            torch.cuda.current_stream(errand.device).wait_event(errand.submitted)
            errand.submitted = None
        failure = None if errand.waits_for is None else errand.waits_for.error
        errand.waits_for = next(errand.course) if failure is None else errand.course.throw(failure)
    except StopIteration:
        if errand.device.type == "cuda":
            errand.finished = torch.cuda.current_stream(errand.device).record_event()
        errand.end(None)
    except BaseException as error:  # the waiting thread's to raise
        errand.end(error)
    else:
        errand.waits_for.when_done(lambda: ready.put(errand))
