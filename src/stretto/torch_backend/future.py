"""The future of an operation: what torch's comm hooks chain their callbacks to.

`torch.futures.Future` with three differences, all in who runs what and what becomes of errors:

- Whoever waits for it completes it, and runs its callbacks, in the thread that waits (`completion.py` says why).
- A callback knows which operation it belongs to, so that the collectives that it starts have names (`naming.py`). What C++ calls
  when the future is completed (the callbacks of a future that it made of this one) belongs to none, and may start no collectives.
- Errors keep their type. torch turns what a callback raises into a RuntimeError with its text, and cannot hand a Python
  exception to C++ at all: DDP's reducer takes the value for a tensor. So the value of a future that has failed *is* a tensor,
  one that raises the error as soon as anything is done with it: DDP's `backward()` raises `PeerLost`, by `.rank`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.torch_backend.naming import Path, in_callback
from stretto.torch_backend.operation import Operation


class FailedTensor(Tensor):
    """Stands for a result that did not come about: every operation on it raises why."""

    error: BaseException

    @staticmethod
    def __new__(cls, error: BaseException, like: Tensor | None) -> FailedTensor:
        shape, dtype, device = (
            ((1,), torch.float32, torch.device("cpu")) if like is None else (like.shape, like.dtype, like.device)
        )
        made: FailedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.error = error
        return made

    def __init__(self, error: BaseException, like: Tensor | None) -> None:
        pass

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"FailedTensor({self.error!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found: list[BaseException] = []
        torch.utils._pytree.tree_map_only(FailedTensor, lambda failed: found.append(failed.error), (args, kwargs))
        raise found[0]


class TransferFuture(torch.futures.Future[Any]):
    """Completed by `complete`, once. `drive`: what a thread that waits can do to bring that about; called any number of times."""

    def __init__(self, path: Path | None, drive: Callable[[], None], devices: Sequence[torch.device]) -> None:
        super().__init__(devices=list(devices))
        self.drive = drive
        self.devices = devices
        self._path = path
        self._num_callbacks = 0
        self._begun = False
        self._lock = threading.Lock()

    # -- completing it ------------------------------------------------------------------------------------------------

    def _is_mine(self) -> bool:
        """Whether the calling thread is the first that comes to complete it."""
        with self._lock:
            first, self._begun = not self._begun, True
        return first

    def complete(self, value: Any) -> None:
        if self._is_mine():
            with in_callback(None):
                super().set_result(value)
            self.drive = _nothing  # which refers to what brought this about, and so to this

    def fail(self, error: BaseException, like: Tensor | None) -> None:
        if not self._is_mine():
            return

        def raise_error(_: object) -> None:
            raise error

        self._set_unwrap_func(raise_error)
        with in_callback(None):
            super().set_result(FailedTensor(error, like))
        self.drive = _nothing

    def set_result(self, result: Any) -> None:
        self.complete(result)

    # -- using it -----------------------------------------------------------------------------------------------------

    def wait(self) -> Any:
        self.drive()
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> TransferFuture:
        path = self.next_path()
        following = TransferFuture(path, self.drive, self.devices)

        def run(_: object) -> None:
            try:
                with in_callback(path):
                    value = callback(self)
            except Exception as error:
                following.fail(error, None)
            else:
                following.complete(value)

        super().add_done_callback(run)
        return following

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        self.then(callback)

    def next_path(self) -> Path | None:
        """The name of what follows this future next; None: it has none itself."""
        with self._lock:
            number = self._num_callbacks
            self._num_callbacks += 1
        return None if self._path is None else (*self._path, number)


def _nothing() -> None:
    return None


def future_of(operation: Operation) -> TransferFuture:
    """The future of an operation, which whoever has it must complete (`finish_future`) when the operation is done."""

    def drive() -> None:
        operation.wait_for_end()
        finish_future(future, operation)

    devices = {tensor.device for tensor in operation.result if tensor.device.type == "cuda"}
    future = TransferFuture(operation.name, drive, sorted(devices, key=str))
    return future


def finish_future(future: TransferFuture, operation: Operation) -> None:
    """Complete the future of an operation that is done."""
    operation.settle()
    if operation.error is None:
        future.complete(operation.result)
    else:
        future.fail(operation.error, operation.result[0] if operation.result else None)
