"""How tensors go from stage to stage: letters that nobody has to ask for, under a name that the receiver knows.

A collective, and `send` with its `recv`, has one length on both sides, agreed on before; here the sender says what comes: a
tree with the dtypes and shapes of its tensors rides in front of their bytes. So micro-batches may differ in size, and layers
may return whatever they like. A letter waits in the receiver's mailbox until it is taken: to send is never to wait, and what a
stage will need arrives while it computes.

    mailbox.send(to, name, tree)        returns at once
    tree = mailbox.take(name, source)   waits for it, with a deadline

Order. Names say which letter is which, so none is needed. Memory. Where letters wait is bounded by the plan: GPipe's last stage
may find a whole batch of activations. On a CPU the sender keeps no copy: a letter's bytes are those of the tensor.

Failure. All workers of a pipeline, of all its replicas, are members. Each sees by itself which peer is lost, and
everyone ends with the first error that it sees or is told of: whoever fails tells all before it raises, so that those who would
only see it leave know why. Nothing goes on after that.

It is a protocol machine on a channel of its own (`protocol/machine.py`): all that is here runs in the communication thread, but
for `Mailbox`, which is for the thread that trains.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.collectives.failures import Roster
from stretto.collectives.reduction import dtype_code
from stretto.errors import FrameError, PeerLost, StrettoError, WireError, WireTimeout
from stretto.partition.letters import Letter, LetterPart, Name, PipelineFailure, failure_of
from stretto.partition.trees import put_together, take_apart
from stretto.protocol.loop import Loop
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage
from stretto.timeouts import Timeouts
from stretto.wire.frames import DTYPE_NAMES

PART_BYTES: Final = 32 << 20
CREDIT_BYTES: Final = 4 * PART_BYTES  # of each peer, on its way; more is bounded by the plan
MOST_BYTES: Final = 1 << 34  # of a tensor
MOST_LETTERS: Final = 1 << 16  # that wait here
TELL_S: Final = 1.0  # how long whoever fails waits until it has told all
HOP_S: Final = 0.1  # of patience for each stage in between, so that the one that is late is blamed, not who waits for it
LOOK_S: Final = 0.25

log = logging.getLogger("stretto.partition")


class ArrivedLetter(NamedTuple):
    """A letter that has come."""

    tree: Any
    wants: list[bool]  # for each tensor of the tree, whether the sender wants its gradient


class Letterbox:
    """Where letters wait, and the error that has ended the pipeline. For both threads."""

    def __init__(self) -> None:
        self.letters: dict[Name, ArrivedLetter] = {}
        self.gone: dict[int, PeerLost] = {}  # who has left in order: nothing more comes from there
        self.touched_at = 0.0
        self.error: StrettoError | None = None
        self.changed = threading.Condition()

    def put(self, name: Name, letter: ArrivedLetter) -> None:
        with self.changed:
            self.letters[name] = letter
            self.changed.notify_all()

    def leave(self, lost: PeerLost) -> None:
        with self.changed:
            self.gone[lost.rank] = lost
            self.changed.notify_all()

    def fail(self, error: StrettoError) -> None:
        """The first error is the one that counts."""
        with self.changed:
            if self.error is None:
                self.error = error
                self.letters.clear()
            self.changed.notify_all()


class PostLetter(NamedTuple):
    """A request: send this. Answered when it has left, or cannot any more."""

    to: int
    parts: list[tuple[LetterPart, memoryview]]


class Tell(NamedTuple):
    """A request: tell all. Answered when they have been told."""

    error: StrettoError


class _Arriving:
    """A letter of which a part has come."""

    def __init__(self, first: LetterPart) -> None:
        self.shape, self.wants = first.shape, first.wants
        self.tensors: dict[int, tuple[Tensor, int]] = {}  # number -> itself, and how many of its bytes are missing

    def add(self, part: LetterPart, payload: memoryview) -> ArrivedLetter | None:
        """The letter, if it is whole now."""
        if self.wants:
            self._fill(part, payload)
        if len(self.tensors) < len(self.wants) or any(missing for _, missing in self.tensors.values()):
            return None
        tensors = [self.tensors[number][0] for number in range(len(self.wants))]
        return ArrivedLetter(put_together(self.shape, tensors), self.wants)

    def _fill(self, part: LetterPart, payload: memoryview) -> None:
        if not 0 <= part.number < len(self.wants) or min(part.sizes, default=0) < 0 or not 0 < part.dtype < len(DTYPE_NAMES):
            raise ValueError(f"tensor {part.number} of {len(self.wants)}, of dtype {part.dtype} and sizes {part.sizes}")
        dtype = getattr(torch, DTYPE_NAMES[part.dtype])
        num_bytes = math.prod(part.sizes) * dtype.itemsize
        if part.number not in self.tensors:
            if num_bytes > MOST_BYTES or payload.nbytes != min(PART_BYTES, num_bytes):  # memory only for who sends that much
                raise ValueError(f"a tensor of {num_bytes} bytes, of which {payload.nbytes} come first")
            try:
                empty = torch.empty(part.sizes, dtype=dtype, device="cpu")
            except (RuntimeError, TypeError) as problem:  # no memory, or sizes that no tensor has
                raise ValueError(f"a tensor of sizes {part.sizes}: {problem}") from problem
            self.tensors[part.number] = empty, num_bytes
        tensor, missing = self.tensors[part.number]
        end = part.offset + payload.nbytes
        if not 0 <= part.offset <= end <= tensor.numel() * tensor.element_size() or payload.nbytes > missing:
            raise ValueError(f"bytes {part.offset} to {end} of a tensor of sizes {list(tensor.shape)}")
        bytes_of(tensor)[part.offset : end] = np.frombuffer(payload, np.uint8)
        self.tensors[part.number] = tensor, missing - payload.nbytes


class PostOffice(Machine):
    """See the module's text."""

    header_type = Letter
    decides_order = False

    def __init__(self, roster: Roster, members: Sequence[int], inbox: Letterbox) -> None:
        self._roster = roster
        self._members = frozenset(members) - {roster.rank}
        self._inbox = inbox
        self._arriving: dict[Name, _Arriving] = {}
        self._tokens = 0
        self._leaving: dict[int, tuple[int, int]] = {}  # token -> where to, and the ticket of the request that it is part of
        self._left: Counter[int] = Counter()  # ticket -> how many of its messages have yet to leave

    def on_request(self, now: float, ticket: int, request: PostLetter | Tell) -> Actions:
        if isinstance(request, PostLetter):
            messages: list[tuple[int, Letter, memoryview]] = [(request.to, header, payload) for header, payload in request.parts]
        else:
            failure, nothing = failure_of(request.error), memoryview(b"")
            messages = [(rank, failure, nothing) for rank in sorted(self._members)]
        messages = [message for message in messages if message[0] not in self._roster.lost]
        tokens = range(self._tokens, self._tokens + len(messages))
        self._tokens = tokens.stop
        if messages:
            self._left[ticket] = len(messages)
        self._leaving |= {token: (message[0], ticket) for token, message in zip(tokens, messages, strict=True)}
        yield from (SendMessage(*message, token) for token, message in zip(tokens, messages, strict=True))
        if not messages:
            yield Reply(ticket)

    def on_sent(self, now: float, token: int) -> Actions:
        if token in self._leaving:
            _, ticket = self._leaving.pop(token)
            self._left[ticket] -= 1
            if not self._left[ticket]:
                del self._left[ticket]
                return [Reply(ticket)]
        return ()

    def on_message(self, now: float, source: int, header: Letter, payload: memoryview) -> Actions:
        if source not in self._members or self._inbox.error is not None:
            return ()
        if isinstance(header, PipelineFailure):
            self._inbox.fail(header.error())
            return ()
        try:
            self._take_in(header, payload)
        except ValueError as problem:
            self._inbox.fail(FrameError(source, f"to a pipeline: {problem}"))
        return ()

    def _take_in(self, part: LetterPart, payload: memoryview) -> None:
        name = Name(*part.name)
        if name not in self._arriving:
            if len(self._arriving) + len(self._inbox.letters) >= MOST_LETTERS:
                raise ValueError(f"more than {MOST_LETTERS} letters that nobody takes")
            self._arriving[name] = _Arriving(part)
        self._inbox.touched_at = time.monotonic()
        if (letter := self._arriving[name].add(part, payload)) is not None:
            del self._arriving[name]
            self._inbox.put(name, letter)

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        for rank in self._members.intersection(left):
            lost = self._roster.lost[rank]
            if self._roster.said_goodbye(rank):
                self._inbox.leave(lost)
            else:
                self._inbox.fail(lost)
        for token in [token for token, (to, _) in self._leaving.items() if to in left]:
            yield from self.on_sent(now, token)  # it never will be


class Mailbox:
    """This worker's end, for the thread that trains. See the module's text."""

    def __init__(self, loop: Loop, roster: Roster, channel: int, members: Sequence[int], timeouts: Timeouts) -> None:
        self._inbox = Letterbox()
        self._rank = roster.rank
        self._timeouts = timeouts
        self._sent: list[Future[None]] = []  # what may not have left yet
        self.running = loop.start(
            PostOffice(roster, members, self._inbox), channel, credit_bytes=CREDIT_BYTES, unsent_bytes=1 << 62
        )

    def send(self, to: int, name: Name, tree: Any, *, wants: Sequence[bool] = ()) -> None:
        """Returns at once; the tensors must not be changed in place until the receiver has them."""
        shape, tensors = take_apart(tree, name.text)
        flags = list(wants) or [False] * len(tensors)
        self._sent.append(self.running.request(PostLetter(to, list(_parts(name, shape, tensors, flags)))))

    def flush(self) -> None:
        """Return when all that was sent has left: its tensors may be changed, and this worker may leave the job."""
        until = time.monotonic() + self._timeouts.arrive_s
        for future in self._sent:
            while not future.done():
                self._raise_if_ended()
                if time.monotonic() > until:
                    what = f"rank {self._rank} of a pipeline could not get rid of what it had sent"
                    raise WireError(f"{what} within {self._timeouts.arrive_s:g} s: somebody takes nothing.")
                with suppress(NotInTime):
                    future.exception(LOOK_S)
            future.result()
        self._sent.clear()

    def take(self, name: Name, source: int, hops: int = 0) -> ArrivedLetter:
        """The letter of that name, from that rank, when it is here. `hops`: how many stages it may be waiting for itself."""
        inbox, began = self._inbox, time.monotonic()
        patience_s, warned = self._timeouts.arrive_s + HOP_S * hops, False
        with inbox.changed:
            while True:
                self._raise_if_ended()
                if name in inbox.letters:
                    return inbox.letters.pop(name)
                if source in inbox.gone:
                    raise inbox.gone[source]
                waited_s = time.monotonic() - max(began, inbox.touched_at)
                if waited_s >= patience_s:
                    raise WireTimeout(source, f"a pipeline ({name.text})", waited_s)
                if waited_s >= self._timeouts.warn_s and not warned:
                    warned = True
                    log.warning("rank %d still waits for rank %d: for %s", self._rank, source, name.text)
                inbox.changed.wait(min(LOOK_S, patience_s - waited_s))

    def _raise_if_ended(self) -> None:
        if self._inbox.error is not None:
            raise self._inbox.error
        if self.running.error is not None:
            raise self.running.error

    @property
    def error(self) -> StrettoError | None:
        """What has ended the pipeline, if it has ended."""
        return self._inbox.error

    def fail(self, error: StrettoError) -> None:
        """This worker cannot go on: tell all, unless they know. Returns when they have been told, or soon after."""
        if self._inbox.error is None:
            self._inbox.fail(error)
        self._sent.clear()
        with suppress(StrettoError, NotInTime):
            self.running.request(Tell(self._inbox.error or error)).result(TELL_S)


def _parts(name: Name, shape: Any, tensors: Sequence[Tensor], wants: list[bool]) -> Iterator[tuple[LetterPart, memoryview]]:
    if not tensors:
        yield LetterPart(name, shape, [], 0, 0, [], 0), memoryview(b"")
    for number, tensor in enumerate(tensors):
        host = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        whole = bytes_of(host)
        for offset in range(0, max(1, whole.nbytes), PART_BYTES):
            part = LetterPart(name, shape, wants, number, dtype_code(host.dtype), list(host.shape), offset)
            yield part, memoryview(whole[offset : offset + PART_BYTES].data)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1)
    memory: NDArray[np.uint8] = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return memory
