"""Tensors that a wire cannot read where they are: on a GPU, or not contiguous.

A wire works on flat host memory. A contiguous CPU tensor is used as it is. Any other is copied out and, when the collective is
done, back:

    CUDA    an event on the caller's stream, a copy on a stream of our own into pinned memory, the host waits for that copy;
            afterwards the copy back is queued on the same stream, and the caller's stream waits for it: the call
            returns once it is queued
    other   an ordinary copy

Pinned buffers are kept and reused (pinning costs milliseconds), each only after its last copy back has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

KEPT_BUFFERS = 8


def _nothing() -> None:
    return None


class Staging:
    """Gives flat host memory for a tensor, and the action that brings the result back to it."""

    def __init__(self, kept_buffers: int = KEPT_BUFFERS) -> None:
        self._kept_buffers = kept_buffers
        self._pinned: dict[tuple[torch.dtype, int], list[tuple[torch.Tensor, torch.cuda.Event]]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def borrow(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        if tensor.device.type == "cuda":
            return self._from_cuda(tensor)
        lazy = tensor.is_conj() or tensor.is_neg()  # torch has yet to conjugate or negate what is in memory
        if tensor.is_contiguous() and not lazy:
            return tensor.detach().view(-1), _nothing
        copy = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return copy, lambda: _overwrite(tensor, copy)

    def lend(
        self, flat: torch.Tensor, tail: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Callable[[], bool] | None, Callable[[], None] | None]:
        """Like `borrow`, for a flat tensor and without waiting: host memory, when it is filled, how to bring it back.

        `tail`: host memory that stands in for the last elements of a tensor on a GPU. Nobody has to wait for the GPU to read it.
        """
        if flat.device.type != "cuda":
            return flat, None, None
        stream = self._stream(flat.device)
        host = self._take_pinned(flat.numel(), flat.dtype)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        body = flat if tail is None else flat[: flat.numel() - tail.numel()]
        if tail is not None:
            host[body.numel() :] = tail
        with torch.cuda.stream(stream):
            host[: body.numel()].copy_(body, non_blocking=True)
            filled = stream.record_event()

        def bring_back() -> None:
            if tail is not None:
                tail.copy_(host[body.numel() :])
            self._back_to_cuda(body, host, stream)

        return host, filled.query, bring_back

    def lend_places(
        self,
        length: int,
        like: torch.Tensor,
        inputs: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[tuple[int, torch.Tensor]],
    ) -> tuple[torch.Tensor, Callable[[], bool], Callable[[], None]]:
        """Pinned memory of so many elements, for tensors on the GPU of `like`: with the inputs copied to their places, when that
        has ended, and how to bring what lies at other places to the outputs."""
        stream = self._stream(like.device)
        host = self._take_pinned(length, like.dtype)
        stream.wait_stream(torch.cuda.current_stream(like.device))
        with torch.cuda.stream(stream):
            for start, tensor in inputs:
                host[start : start + tensor.numel()].view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
                tensor.record_stream(stream)
            filled = stream.record_event()

        def bring_back() -> None:
            stream.wait_stream(torch.cuda.current_stream(like.device))
            with torch.cuda.stream(stream), torch.no_grad():
                for start, tensor in outputs:
                    tensor.detach().copy_(host[start : start + tensor.numel()].view(tensor.shape), non_blocking=True)
                    tensor.record_stream(stream)
                finished = stream.record_event()
            torch.cuda.current_stream(like.device).wait_event(finished)
            self._keep(host, finished)

        return host, filled.query, bring_back

    def _from_cuda(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        stream = self._stream(tensor.device)
        host = self._take_pinned(tensor.numel(), tensor.dtype)
        flat = tensor.detach().contiguous().view(-1)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(flat, non_blocking=True)
            flat.record_stream(stream)
        stream.synchronize()
        return host, lambda: self._back_to_cuda(tensor, host, stream)

    def _back_to_cuda(self, tensor: torch.Tensor, host: torch.Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            _overwrite(tensor, host[: tensor.numel()], non_blocking=True)
            tensor.record_stream(stream)
            finished = stream.record_event()
        torch.cuda.current_stream(tensor.device).wait_event(finished)
        self._keep(host, finished)

    def _keep(self, host: torch.Tensor, finished: torch.cuda.Event) -> None:
        kept = self._pinned.setdefault((host.dtype, host.numel()), [])
        kept.append((host, finished))
        if sum(map(len, self._pinned.values())) > self._kept_buffers:
            self._pinned = {(host.dtype, host.numel()): kept[-1:]}

    def _take_pinned(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        kept = self._pinned.get((dtype, length))
        if kept:
            host, finished = kept.pop(0)
            finished.synchronize()
            return host
        with torch.inference_mode(False):  # it is kept for others
            return torch.empty(length, dtype=dtype, pin_memory=True, device="cpu")

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def _overwrite(tensor: torch.Tensor, flat: torch.Tensor, *, non_blocking: bool = False) -> None:
    with torch.no_grad():
        tensor.detach().copy_(flat.view(tensor.shape), non_blocking=non_blocking)
