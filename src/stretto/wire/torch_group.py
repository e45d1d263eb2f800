"""The torch.distributed wire: a wire of ours, and beside it a process group for the backend's own collectives.

An inner wire (`tcp.py` or `zeromq.py`) connects the same ranks and carries every message. The process group runs whole
collectives (`torch_native.py`): that is what gloo and NCCL are good at. Messages of our own plans do not go through it. gloo's
send and receive cannot be cancelled, end the process when sizes differ and name no rank, and were slower than our sockets;
NCCL's move device memory, and plans work in host memory.

Who is lost is the inner wire's word. Once somebody is, the group is of no use any more; the wire is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from stretto.errors import ConfigurationError, JobError, PeerLost
from stretto.launching.membership import Peer
from stretto.timeouts import Timeouts
from stretto.wire.base import Consume, Handle, Listener, LostListener, OnMessage, Tag, ViewListener, Wire
from stretto.wire.torch_native import NativeCollectives
from stretto.wire.torch_works import GroupWorks, TorchProcessGroup

TOPIC_NATIVE: Final = 10
BACKENDS: Final = ("gloo", "nccl")


def torch_group(
    backend: str, rank: int, world_size: int, *, store: Store | None = None, timeout_s: float = 60.0
) -> dist.ProcessGroup:
    """A new group of all ranks for one wire. All ranks call it together.

    It is never torch's default group: a group that two threads use mixes up their data without an error. Where there is no
    default group yet, one is made, from `store` or as torch does it, from MASTER_ADDR and MASTER_PORT.
    """
    if backend not in BACKENDS or not dist.is_backend_available(backend):
        has = " and ".join(repr(name) for name in BACKENDS if dist.is_backend_available(name))
        raise ConfigurationError(
            f"the torch backend {backend!r} cannot be used: of those that stretto drives, torch {torch.__version__} here "
            f"has {has or 'none'}.\nWrite one that it has, or use stretto's own wire (wire='auto')."
        )
    limit = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        _make_default_group(backend, rank, world_size, store, limit)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ConfigurationError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"but this is rank {rank} of {world_size} of the job.\n"
            f"Start both from the same launcher, or leave init_process_group to stretto."
        )
    group = dist.new_group(list(range(world_size)), backend=backend, timeout=limit)
    assert isinstance(group, dist.ProcessGroup)  # torch returns an int to ranks outside of the group
    return group


def _make_default_group(backend: str, rank: int, world_size: int, store: Store | None, limit: timedelta) -> None:
    place: dict[str, Any] = {"init_method": "env://"} if store is None else {"store": store}
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=limit, **place)
    except (ValueError, RuntimeError) as error:
        raise JobError(
            f"torch.distributed.init_process_group({backend!r}, rank={rank}, world_size={world_size}) failed: {error}\n"
            f"Every rank must reach MASTER_ADDR:MASTER_PORT, which is not stretto's port; `stretto run` and torchrun set both."
        ) from error


class TorchGroupWire(Wire):
    """See the module's text. `inner` is connected already and belongs to this wire from now on; so does `group`."""

    def __init__(self, inner: Wire, group: TorchProcessGroup, *, timeouts: Timeouts | None = None) -> None:
        if (group.rank(), group.size()) != (inner.rank, inner.world_size):
            raise ConfigurationError(
                f"rank {group.rank()} of a group of {group.size()} over a wire that is rank {inner.rank} of {inner.world_size}.\n"
                f"Both must connect the same ranks under the same numbers: make the group with torch_group()."
            )
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.segment_bytes = inner.segment_bytes
        self.lost = inner.lost
        self._works = GroupWorks(group, inner.wake, (timeouts or Timeouts()).arrive_s)
        self.backend = self._works.backend
        self._closed = False
        inner.on_lost(self._on_lost)
        self.native_all_reduce = NativeCollectives(self, self._works, TOPIC_NATIVE).all_reduce

    @property
    def broken(self) -> str | None:
        """Why the group is no longer used, if it is not."""
        return self._works.broken

    def progress(self, timeout_s: float) -> None:
        self.inner.progress(0.0 if self._works.collect() else timeout_s)
        self._works.collect()

    def _on_lost(self, error: PeerLost) -> None:
        if not self.said_goodbye(error.rank) and self._works.broken is None:
            self._works.broken = str(error)

    # -- the inner wire's part ----------------------------------------------------------------------------------------

    def send(self, data: memoryview, to: int, tag: Tag, dtype: int, on_done: Callable[[Handle], None] | None = None) -> Handle:
        return self.inner.send(data, to, tag, dtype, on_done)

    def recv(
        self,
        source: int,
        tag: Tag,
        num_bytes: int,
        dtype: int,
        consume: Consume,
        on_done: Callable[[Handle], None] | None = None,
        into: memoryview | None = None,
    ) -> Handle:
        return self.inner.recv(source, tag, num_bytes, dtype, consume, on_done, into)

    def cancel(self, channel: int, sequence: int) -> None:
        self.inner.cancel(channel, sequence)

    def post(self, to: int, topic: int, body: bytes) -> None:
        self.inner.post(to, topic, body)

    def listen(self, topic: int, listener: Listener) -> None:
        self.inner.listen(topic, listener)

    def serve(self, channel: int, on_message: OnMessage, credit_bytes: int) -> None:
        self.inner.serve(channel, on_message, credit_bytes)

    def offer(
        self, to: int, channel: int, header: bytes, payload: memoryview, on_done: Callable[[Handle], None] | None = None
    ) -> Handle:
        return self.inner.offer(to, channel, header, payload, on_done)

    @property
    def peers(self) -> list[int]:
        return self.inner.peers

    @property
    def generation(self) -> int:  # type: ignore[override]  # read-only here: the view never changes
        return self.inner.generation

    def admit(self, peer: Peer) -> None:
        raise self._is_fixed(f"admit(rank {peer.rank})")

    def retire(self, rank: int, generation: int) -> None:
        raise self._is_fixed(f"retire({rank})")

    def _is_fixed(self, asked: str) -> ConfigurationError:
        return ConfigurationError(
            f"{asked} on rank {self.rank}: a {self.backend} group is made once, of all its ranks, so members cannot come or go.\n"
            f'Use a wire of stretto\'s own (wire="tcp" or "zeromq"), or start the job again.'
        )

    def on_view(self, listener: ViewListener) -> None:
        self.inner.on_view(listener)

    def joined_in(self, rank: int) -> int:
        return self.inner.joined_in(rank)

    def on_lost(self, listener: LostListener) -> None:
        self.inner.on_lost(listener)

    def said_goodbye(self, rank: int) -> bool:
        return self.inner.said_goodbye(rank)

    def wake(self) -> None:
        self.inner.wake()

    def now(self) -> float:
        return self.inner.now()

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._end(self.inner.close)

    def abandon(self) -> None:
        self._end(self.inner.abandon)

    def _end(self, leave: Callable[[], None]) -> None:
        if not self._closed:
            self._closed = True
            leave()
            self._works.stop()
