"""The compression thread: it takes buckets through their exchanges, so that encoding overlaps backward and the wire.

One thread advances all exchanges of a model, in the order in which their collectives end, so one bucket is encoded while others
travel; the first steps are taken in the order of submission. On a GPU the steps are queued on a stream of the thread's own, and
the first step of a bucket only once the submitting stream has computed its gradients: the steps of other buckets would queue up
behind it, and wait for the rest of backward.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from typing import Final

import torch

from stretto.aggregate.all_reduce.exchange import UnderWay
from stretto.collectives.request import InProgress
from stretto.errors import StrettoError

STOP_S = 5.0
COMPUTED_POLL_S: Final = 0.0003
log = logging.getLogger("stretto")


class ThreadedExchange(InProgress):
    """An exchange that the thread advances."""

    def __init__(self, under_way: UnderWay, device: torch.device, thread: threading.Thread) -> None:
        super().__init__()
        self.under_way = under_way
        self._thread = thread
        self.device = device
        self.waits_for: InProgress | None = None
        self.submitted: torch.cuda.Event | None = None
        self.finished: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.submitted = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Return when it has ended; raise what went wrong.

        There is no deadline of its own. Each collective of it has one, and it may have to wait for other exchanges first, or for
        the GPU to compute what it begins with. A thread that ends, whatever the reason, ends its exchanges; one that is submitted
        too late for that finds out here."""
        while not self._finished.wait(1.0):
            if not self._thread.is_alive() and not self.done:
                raise StrettoError("the compression thread has ended, and this exchange with it. The log says why: report it.")
        if self.finished is not None:  # also after an error: what is under way on the GPU still uses the bucket's memory
            torch.cuda.current_stream(self.device).wait_event(self.finished)
        if self.error is not None:
            raise self.error

    def has_ended(self, within_s: float) -> bool:
        """Wait for its end so long, and say whether it has come, well or not."""
        return self._finished.wait(within_s)

    @property
    def is_computed(self) -> bool:
        """Whether the gradients are there that it begins with."""
        try:
            return self.submitted is None or bool(self.submitted.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # the GPU has failed, which the first step will find out too, and whoever waits for it
            return True

    @property
    def arrived(self) -> bool:
        if not self.done or self.error is not None:
            return False
        return self.finished is None or bool(self.finished.query())  # type: ignore[no-untyped-call]


class CompressionThread:
    """Advances exchanges. The thread ends with `stop`, or when nobody holds on to this object any more."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[ThreadedExchange | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=_run, args=(self._ready,), name="stretto-compression", daemon=True)
        self._thread.start()

    def submit(self, under_way: UnderWay, device: torch.device) -> ThreadedExchange:
        exchange = ThreadedExchange(under_way, device, self._thread)
        with self._lock:
            if self._stopped:
                exchange.finish(_shut_down())
            else:
                self._ready.put(exchange)
        return exchange

    def stop(self) -> None:
        """End the thread; exchanges under way, and later ones, fail. Waits until it has let go of what it was doing."""
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


def _run(ready: queue.SimpleQueue[ThreadedExchange | None]) -> None:
    streams: dict[torch.device, torch.cuda.Stream] = {}
    under_way: set[ThreadedExchange] = set()
    early: deque[ThreadedExchange] = deque()
    error = _shut_down()
    try:
        while _take_step(ready, early, streams, under_way):
            pass
    except Exception as failure:  # a bug of ours, or a GPU without a stream, must not leave anybody waiting for ever
        log.exception("the compression thread failed")
        error = StrettoError(f"the compression thread failed: {failure!r}")
        error.__cause__ = failure
    under_way |= set(early)
    while not ready.empty():
        under_way |= {left for left in [ready.get()] if left is not None}
    for exchange in under_way:
        if not exchange.done:
            exchange.finish(error)


def _take_step(
    ready: queue.SimpleQueue[ThreadedExchange | None],
    early: deque[ThreadedExchange],
    streams: dict[torch.device, torch.cuda.Stream],
    under_way: set[ThreadedExchange],
) -> bool:
    """Advance the next exchange that is ready; False if none will come. A function, so that a thread that waits holds none."""
    exchange = _next(ready, early)
    if exchange is None:
        return False
    under_way.add(exchange)
    with _stream_of(exchange, streams):
        _advance(exchange, ready)
    if exchange.done:
        under_way.discard(exchange)
    return True


def _next(ready: queue.SimpleQueue[ThreadedExchange | None], early: deque[ThreadedExchange]) -> ThreadedExchange | None:
    """The next exchange that can go on. `early`: those that have not begun, because the GPU is still computing the gradients of
    the first of them. None begins before an earlier one: the closing notes say what was found in all buckets before them."""
    while not early or not early[0].is_computed:
        try:
            exchange = ready.get(timeout=COMPUTED_POLL_S if early else None)
        except queue.Empty:
            continue
        if exchange is None or exchange.waits_for is not None or (not early and exchange.is_computed):
            return exchange
        early.append(exchange)
        del exchange
    return early.popleft()


def _stream_of(
    exchange: ThreadedExchange, streams: dict[torch.device, torch.cuda.Stream]
) -> contextlib.AbstractContextManager[object]:
    if exchange.device.type != "cuda":
        return contextlib.nullcontext()
    if exchange.device not in streams:
        streams[exchange.device] = torch.cuda.Stream(exchange.device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(streams[exchange.device])


def _advance(exchange: ThreadedExchange, ready: queue.SimpleQueue[ThreadedExchange | None]) -> None:
    """On to the next collective, or to the end."""
    try:
        failure = None if exchange.waits_for is None else exchange.waits_for.error
        exchange.waits_for = next(exchange.under_way) if failure is None else exchange.under_way.throw(failure)
    except StopIteration:
        _end(exchange, None)
    except BaseException as error:  # the waiting thread's to raise
        _end(exchange, error)
    else:
        exchange.waits_for.when_done(lambda: ready.put(exchange))


def _end(exchange: ThreadedExchange, error: BaseException | None) -> None:
    if exchange.device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a GPU that has failed: there is nothing to wait for, and an error to raise
            exchange.finished = torch.cuda.current_stream(exchange.device).record_event()
    exchange.finish(error)
