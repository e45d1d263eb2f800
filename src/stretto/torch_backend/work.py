"""The handle of an operation, as torch knows it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from stretto.torch_backend.completion import CompletionThread
from stretto.torch_backend.future import TransferFuture, finish_future, future_of
from stretto.torch_backend.operation import Operation
from stretto.torch_backend.pairs import Received


class OperationWork(dist.Work):
    """One operation under way. `wait` returns when its results are where they belong, and raises what went wrong."""

    def __init__(self, operation: Operation, completion: CompletionThread) -> None:
        super().__init__()
        self._operation = operation
        self._completion = completion
        self._future: TransferFuture | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = None if timeout is None else timeout.total_seconds()
        self._operation.wait(seconds if seconds else None)  # torch's way to say "no timeout" is 0
        return True

    def is_completed(self) -> bool:
        if not self._operation.done:
            return False
        self._operation.settle()
        return True

    def is_success(self) -> bool:
        return self._operation.has_succeeded

    def exception(self) -> BaseException | None:
        return self._operation.error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        self.wait()
        return self._operation.result

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        """For a receive, the place in the group of the member that sent the message."""
        raise RuntimeError("source_rank of an operation that is not a receive: only what was received has a source.")

    def get_future(self) -> TransferFuture:
        """Completed when the transfer is, in a thread of the group's own or in that of whoever waits for it."""
        if self._future is None:
            operation, completion = self._operation, self._completion
            future = self._future = future_of(operation)
            operation.when_done(lambda: completion.run(lambda: finish_future(future, operation)))
        return self._future

    def __del__(self) -> None:
        """Nobody waits for it any more; its results are to be where they belong all the same."""
        operation: Operation | None = getattr(self, "_operation", None)
        if operation is not None and self._future is None and operation.needs_finishing:
            completion = self._completion
            if operation.done:
                operation.settle()
            else:
                operation.when_done(lambda: completion.run(operation.settle))


class ReceiveWork(OperationWork):
    """A receive, which has a source."""

    def __init__(self, operation: Operation, completion: CompletionThread, received: Received) -> None:
        super().__init__(operation, completion)
        self._received = received

    def _source_rank(self) -> int:
        source = self._received.source
        if source is None:
            raise RuntimeError("source_rank of a receive that is still under way: wait for it first.")
        return source
