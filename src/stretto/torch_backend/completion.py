"""The thread that completes a group's futures.

A callback of a future may wait for further collectives (comm hooks do), so it must not run in the communication thread, which
carries these. A group's futures are completed by a thread of the group's own, one after the other in the order in which their
transfers have ended; whoever waits for a future completes it in its own thread instead (`future.py`). So a callback that waits
for a later future of the same group completes that one itself, and nothing waits for a thread that waits for it.

That holds for futures of ours. A callback may also wait for something else that a later callback brings about: an event, or a
future of the program's own. So where a task takes long and others wait, the queue gets another thread, which goes on with the
next one; the first ends with its task. Names come from futures and not from threads (`naming.py`), so nothing depends on who runs
what. `MOST_THREADS` bounds how many callbacks may wait like that for a later one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

STOP_S: Final = 5.0
LONG_S: Final = 0.05  # that a task takes before the queue gets another thread
MOST_THREADS: Final = 32

log = logging.getLogger("stretto.torch")
Task = Callable[[], None]


class CompletionThread:
    """Begins what it is given in order; what takes long runs beside the next. It starts with the first task, and ends with `stop`
    or with this object."""

    def __init__(self) -> None:
        self._queue = _Queue()

    def run(self, task: Task) -> None:
        """From any thread."""
        self._queue.put(task)

    def stop(self) -> None:
        """End the thread when it has run what it was given."""
        self._queue.stop()
        self._queue.wait_for_end()

    def __del__(self) -> None:
        self._queue.stop()  # and no more: whoever collects garbage must not wait


class _Queue:
    """Tasks, and the thread that takes them: the leader. While it is busy and tasks wait, a second thread watches it, and becomes
    the leader when a task takes long; the first then ends with its task.

    Invariant: where a task waits, there is a leader, and if that is busy, a watcher; or a thread is about to see to it. Whoever
    makes it so looks afterwards: `put` when it has put a task, the leader when it has begun one, a watcher when it has gone.

    Nothing waits for a lock in `put`: the collector of garbage may call it in the midst of anything, of `put` too."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()  # None: the leader ends
        self._is_led, self._is_watched = threading.Lock(), threading.Lock()  # held while there is a leader, a watcher
        self._change = threading.Lock()  # of the following
        self._leader: threading.Thread | None = None
        self._is_busy = False
        self._num_begun = 0
        self._threads: set[threading.Thread] = set()

    def put(self, task: Task) -> None:
        self._tasks.put(task)
        self._see_to_threads()

    def stop(self) -> None:
        if self._is_led.locked():
            self._tasks.put(None)
            self._see_to_threads()

    def wait_for_end(self) -> None:
        if threading.current_thread() not in self._threads and self._is_led.acquire(timeout=STOP_S):
            self._is_led.release()
            self._see_to_threads()  # of what was put meanwhile, when there seemed to be a leader

    def _see_to_threads(self) -> None:
        if self._tasks.empty():
            return
        if self._is_led.acquire(blocking=False):
            self._start(self._lead)
        elif self._is_busy and self._is_watched.acquire(blocking=False):
            self._start(self._watch)

    def _start(self, what: Callable[[], None]) -> None:
        def run() -> None:
            self._threads.add(threading.current_thread())
            try:
                what()
            finally:
                self._threads.discard(threading.current_thread())

        threading.Thread(target=run, name="stretto-completion", daemon=True).start()

    def _lead(self) -> None:
        me = self._leader = threading.current_thread()
        while (task := self._tasks.get()) is not None:
            with self._change:
                self._is_busy = True
                self._num_begun += 1
            self._see_to_threads()
            _run(task)
            del task
            with self._change:
                if self._leader is not me:
                    return
                self._is_busy = False
        self._is_led.release()
        self._see_to_threads()

    def _watch(self) -> None:
        while self._is_busy and not self._tasks.empty():
            number = self._num_begun
            time.sleep(LONG_S)
            if self._take_over(number):
                self._is_watched.release()
                self._lead()
                return
        self._is_watched.release()
        self._see_to_threads()

    def _take_over(self, number: int) -> bool:
        """Become the leader, if it is still at the task of that number and another one waits."""
        with self._change:
            is_stuck = self._is_busy and self._num_begun == number and not self._tasks.empty()
            if not is_stuck or len(self._threads) > MOST_THREADS:
                return False
            self._leader, self._is_busy = threading.current_thread(), False
            return True


def _run(task: Task) -> None:
    try:
        task()
    except Exception:
        log.exception("a callback of a future failed")
