"""The machine of gossip in steps: in step t everybody sends to its targets and waits for its sources.

    running.request(Post(t, messages))              what this worker sends in step t; returns at once
    running.request(Take(t, late=0)).result()       Taken: all messages of steps up to t that are here, when those of steps up to
                                                    t - late are; and who takes no part in step t + 1

A message is a vector of bytes and a *note* of a few numbers. It travels in pieces of `PIECE_BYTES`, and counts when all of it is
here: a message whose sender dies in the middle is dropped as a whole. What messages mean is not known here (`averaging.py`,
`push_sum.py`, `compressed.py`).

Bounded memory: the receiver says which steps it has taken, and nobody ends step t before its targets have taken step
t - `window`, which is `late` + 2. So a peer has at most `window` + 1 messages under way to a worker, and what exceeds that is
ignored. In steps that wait for each other anyway this waits for nobody: a target that is a step behind has taken all before it.

A message of more than `UNASKED_BYTES` for step t + 1 leaves when its target is done with step t (with step t - `late`), and waits
here until then. Without that it would share the target's link with what the target still waits for, and make whoever is late
later: with one target a step, on links where a message takes half a second, workers fell out of step for good, and took twice as
long.

Who dies, or finishes, has *left*: nobody waits for it, and from the next step on nobody sends to it. Its complete messages count.
A neighbour that lives and is slow is waited for; `Missing` says who that is.

Who takes part in step t + 1 is settled when step t ends. One that comes back asks everybody for a step that is not settled yet,
takes the latest of these, and says so; whoever it has asked ends no further step before it has heard:

    newcomer                        everybody else
    AskStep             -->
                        <--         StepSaid(e)     the first one that is not settled here; 0: a newcomer too
    TakesPartFrom(max e) -->

Of two that come back at once the one of lower rank goes first, and the other one counts with what it has said then.

Cost:      one message of the payload's length to each target a step, and two of a few bytes to each source.
Invariant: every complete message is handed over exactly once, to the step that it was sent for or a later one; `late` = 0: to its
           own. Two that are neighbours both ways, and both live, have each other's message in the same steps.
Needs:     messages that are not lost while their sender lives. Their order, and that they come once, it does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from stretto.aggregate.gossip.graph import MixingGraph
from stretto.compress.buffer_pool import BufferPool
from stretto.protocol.machine import Actions, Machine, Payload, Reply, SendMessage

PIECE_BYTES: Final = 4 << 20
UNASKED_BYTES: Final = 256 << 10


class MessageNote(msgspec.Struct, frozen=True, array_like=True):
    """What a message says beside its values. `share`: of them, and of `mass`, for the receiver, in push-sum. `whole`: all values,
    where other messages hold what has changed. `asks`: the sender wants the next message to be whole."""

    share: float = 1.0
    mass: float = 1.0
    whole: bool = False
    asks: bool = False


class MessagePiece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """A piece of a message of one step; the payload goes to `start` of its `total` bytes."""

    step: int
    note: MessageNote
    start: int
    total: int


class StepTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Your message of that step is used, and its memory free."""

    step: int


class StepReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Messages of steps up to that one may leave for the sender of this."""

    step: int


class AskStep(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """I have come back. From which step on can you count with me?"""


class StepSaid(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """From this one on; 0: I do not take part myself yet."""

    step: int


class TakesPartFrom(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """I take part from this step on."""

    step: int


class Outgoing(NamedTuple):
    """To one target. The payload must not change any more."""

    to: int
    payload: Payload
    note: MessageNote


class Post(NamedTuple):
    """This worker's messages of a step; steps come one after the other."""

    step: int
    messages: Sequence[Outgoing]


class Take(NamedTuple):
    """End a step: the reply is `Taken`."""

    step: int
    late: int = 0


class Arrived(NamedTuple):
    """A complete message. `payload`: bytes, the receiver's own."""

    step: int
    source: int
    note: MessageNote
    payload: Tensor


class Taken(NamedTuple):
    """Messages in the order of steps and sources. `gone`: who takes no part in the next step."""

    messages: list[Arrived]
    gone: frozenset[int]


class EnterSteps(NamedTuple):
    """For a worker that has come back, instead of the steps before: take part, from the step `at_least` or later."""

    at_least: int


class EnteredSteps(NamedTuple):
    """From this step on it does; and who does not."""

    step: int
    gone: frozenset[int]


class Missing(NamedTuple):
    """Whom does the step wait for? The reply is a list of ranks."""


@dataclass(eq=False)
class Incoming:
    """A message of which something has come."""

    note: MessageNote
    total: int
    memory: Tensor
    bytes_here: int = 0
    starts: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return self.bytes_here == self.total and bool(self.starts)


class NeighbourExchange(Machine):
    """See the module's text. `whole_bytes`: the length of a message that is `whole`; `most_bytes`: the most that another has.
    `first_step`: how many steps there have been; None: this worker has come back, and has to `EnterSteps`."""

    header_type = MessagePiece | StepTaken | StepReady | AskStep | StepSaid | TakesPartFrom

    def __init__(
        self,
        rank: int,
        size: int,
        graph: MixingGraph,
        *,
        whole_bytes: int,
        most_bytes: int,
        late: int = 0,
        first_step: int | None = 0,
    ) -> None:
        self.rank, self.size, self.graph = rank, size, graph
        self.whole_bytes, self.most_bytes = whole_bytes, most_bytes
        self.window = late + 2
        self.gone: frozenset[int] = frozenset()
        self._first = self.step = first_step or 0  # the last one that was posted
        self.takes_part = first_step is not None
        self._settled = self.step + 1  # who takes part in that step is settled
        self._since: dict[int, int] = {}  # who has come back, and takes part from that step on, which is not settled yet
        self._asking: set[int] = set()  # who has come back, and has not said from which step on
        self._entering: tuple[int, int, dict[int, int | None]] | None = None  # this worker: ticket, at_least, what others said
        self.num_ignored = 0
        self._pool = BufferPool(most=4)
        self._incoming: dict[tuple[int, int], Incoming] = {}  # (step, source)
        self._awaited: dict[int, set[int]] = {}  # step that was posted -> sources whose message is not complete
        self._untaken: dict[int, set[int]] = {}  # step -> targets that have not said that they have taken it
        self._late = late
        self._ready: dict[int, int] = {}  # target -> the last step of which it wants messages
        self._held: dict[int, list[tuple[int, list[SendMessage]]]] = {}  # target -> messages that wait for its word, by step
        self._ending: tuple[int, Take] | None = None  # the ticket of the step that is being ended

    # -- events -------------------------------------------------------------------------------------------------------

    def on_request(self, now: float, ticket: int, request: Post | Take | EnterSteps | Missing) -> Actions:
        match request:
            case Post():
                return [*self._post(request), Reply(ticket)]
            case Take():
                assert self._ending is None and request.step == self.step, "a step is ended once, after it was posted"
                self._ending = ticket, request
                return self._end_step()
            case EnterSteps(at_least):
                others = sorted(set(range(self.size)) - {self.rank} - self.gone)
                self._entering = ticket, at_least, dict.fromkeys(others)
                return [*(SendMessage(to, AskStep()) for to in others), *self._take_part()]
            case Missing():
                return [Reply(ticket, self._missing())]

    def on_message(self, now: float, source: int, header: Any, payload: memoryview) -> Actions:
        match header:
            case AskStep():
                self._asking.add(source)
                return [SendMessage(source, StepSaid(self._settled + 1 if self.takes_part else 0))]
            case StepSaid(step):
                if step > 0 or source > self.rank:
                    self._hear(source, step)
                return self._take_part()
            case TakesPartFrom(step):
                self._asking.discard(source)
                self._since[source] = step
                self._ready[source] = step + self._late  # more it has not said in this life
                self._hear(source, step + 1)
                return [*self._take_part(), *self._end_step()]
            case StepReady(step):
                return self._let_go(source, step)
            case StepTaken(step):
                self._untaken.get(step, set()).discard(source)
            case MessagePiece():
                if self._is_wanted(source, header, payload):
                    self._take_in(source, header, payload)
                else:
                    self.num_ignored += 1
        return self._end_step()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        """Those that left are gone until they say, in another life, that they take part."""
        self.gone |= frozenset(left)
        for key in [key for key, each in self._incoming.items() if key[1] in left and not each.is_complete]:
            del self._incoming[key]
        for ranks in (*self._awaited.values(), *self._untaken.values(), self._asking):
            ranks.difference_update(left)
        for rank in left:
            self._since.pop(rank, None)
            self._held.pop(rank, None)
            self._ready.pop(rank, None)
            if self._entering is not None:
                self._entering[2].pop(rank, None)
        if self._entering is not None:
            self._entering[2].update(dict.fromkeys(joined))
            return [*(SendMessage(rank, AskStep()) for rank in joined), *self._take_part()]
        return self._end_step()

    # -- coming back --------------------------------------------------------------------------------------------------

    def _hear(self, source: int, step: int) -> None:
        """From when on this worker may count with that one, as far as it is concerned."""
        if self._entering is not None and self._entering[2].get(source, 0) is None:
            self._entering[2][source] = step

    def _take_part(self) -> list[SendMessage | Reply]:
        """When everybody has said from which step on."""
        if self._entering is None or None in self._entering[2].values():
            return []
        (ticket, at_least, said), self._entering = self._entering, None
        steps = {rank: step for rank, step in said.items() if step is not None}
        first = max(at_least, 1, *steps.values())
        self.takes_part, self._first, self.step = True, first - 1, first - 1
        self.gone |= {rank for rank, step in steps.items() if step == 0}  # newcomers too, who will say it
        self._settle(first)
        return [*(SendMessage(to, TakesPartFrom(first)) for to in sorted(said)), Reply(ticket, EnteredSteps(first, self.gone))]

    def _settle(self, step: int) -> None:
        """Who takes part in it, but for those that leave before."""
        self._settled = step
        back = [rank for rank, since in self._since.items() if since <= step]
        self.gone -= set(back)
        for rank in back:
            del self._since[rank]

    # -- sending ------------------------------------------------------------------------------------------------------

    def _post(self, post: Post) -> list[SendMessage]:
        assert post.step == self.step + 1, "steps come one after the other"
        self.step = post.step
        here = {source for step, source in self._incoming if step == self.step and self._incoming[step, source].is_complete}
        self._awaited[self.step] = set(self.graph.sources(self.rank, self.size, self._graph_step(self.step))) - self.gone - here
        messages = [each for each in post.messages if each.to not in self.gone]
        self._untaken[self.step] = {each.to for each in messages}
        pieces = []
        for each in messages:
            if self._may_leave(each):
                pieces.append(self._pieces(each))
            else:
                self._held.setdefault(each.to, []).append((self.step, self._pieces(each)))
        # In turns, so that all targets have something to mix at about the same time.
        return [piece for turn in range(max(map(len, pieces), default=0)) for each in pieces for piece in each[turn : turn + 1]]

    def _may_leave(self, message: Outgoing) -> bool:
        """A small one is sooner there than a word from there would be here."""
        if message.to in self._held:
            return False
        small = memoryview(message.payload).nbytes <= UNASKED_BYTES
        return small or self.step <= self._ready.get(message.to, self._first + 1 + self._late)

    def _let_go(self, target: int, step: int) -> list[SendMessage]:
        """The target is done with what was before that step."""
        self._ready[target] = max(step, self._ready.get(target, 0))
        held = self._held.pop(target, [])
        left = [each for each in held if each[0] > step]
        if left:
            self._held[target] = left
        return [piece for number, pieces in held if number <= step for piece in pieces]

    def _pieces(self, message: Outgoing) -> list[SendMessage]:
        view = memoryview(message.payload).cast("B") if memoryview(message.payload).nbytes else memoryview(b"")
        return [
            SendMessage(message.to, MessagePiece(self.step, message.note, start, view.nbytes), view[start : start + PIECE_BYTES])
            for start in range(0, max(1, view.nbytes), PIECE_BYTES)
        ]

    @staticmethod
    def _graph_step(step: int) -> int:
        """Graphs count steps from 0."""
        return step - 1

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _is_wanted(self, source: int, piece: MessagePiece, payload: memoryview) -> bool:
        """Whether this is a piece of a message that is due, or will be, and as long as it has to be."""
        note, known = piece.note, self._incoming.get((piece.step, source))
        if source in self.gone and piece.step < self._since.get(source, piece.step + 1):
            return False
        if known is None and not self._is_due(source, piece.step):
            return False
        if known is not None and (piece.start in known.starts or (known.total, known.note) != (piece.total, note)):
            return False
        fits = piece.total == self.whole_bytes if note.whole else 0 <= piece.total <= self.most_bytes
        wanted = min(PIECE_BYTES, piece.total - piece.start)
        return (
            fits
            and 0.0 <= note.share <= 1.0
            and 0.0 <= note.mass < float("inf")  # more than there are workers for a while, where some have heard of a death
            and 0 <= piece.start <= max(0, piece.total - 1)
            and piece.start % PIECE_BYTES == 0
            and payload.nbytes == wanted
        )

    def _is_due(self, source: int, step: int) -> bool:
        """Whether a message may begin: one that is waited for, or one of the next steps, of which there are never many."""
        if step <= self.step:
            return source in self._awaited.get(step, ())
        ahead = sum(1 for other, rank in self._incoming if rank == source and other > self.step)
        return ahead <= self.window and source in self.graph.sources(self.rank, self.size, self._graph_step(step))

    def _take_in(self, source: int, piece: MessagePiece, payload: memoryview) -> None:
        key = piece.step, source
        if key not in self._incoming:
            memory = self._pool.empty(piece.total, torch.uint8, torch.device("cpu"))
            self._incoming[key] = Incoming(piece.note, piece.total, memory)
        message = self._incoming[key]
        if payload.nbytes:  # numpy lets other threads run while it copies
            message.memory.numpy()[piece.start : piece.start + payload.nbytes] = np.frombuffer(payload, np.uint8)
        message.starts.add(piece.start)
        message.bytes_here += payload.nbytes
        if message.is_complete:
            self._awaited.get(piece.step, set()).discard(source)

    # -- the end of a step --------------------------------------------------------------------------------------------

    def _missing(self) -> list[int]:
        if self._ending is None:
            return []
        _, take = self._ending
        due = [sources for step, sources in self._awaited.items() if step <= take.step - take.late]
        slow = [targets for step, targets in self._untaken.items() if step <= take.step - self.window]
        return sorted(self._asking.union(*due, *slow))

    def _end_step(self) -> Actions:
        if self._ending is None or self._missing():
            return ()
        (ticket, take), self._ending = self._ending, None
        keys = sorted(key for key, each in self._incoming.items() if each.is_complete and key[0] <= take.step)
        messages = []
        for step, source in keys:
            each = self._incoming.pop((step, source))
            messages.append(Arrived(step, source, each.note, each.memory))
        self._awaited = {step: sources for step, sources in self._awaited.items() if sources}
        self._untaken = {step: targets for step, targets in self._untaken.items() if targets}
        self._settle(take.step + 1)
        said = [SendMessage(source, StepTaken(step)) for step, source in keys if source not in self.gone]
        coming = take.step + 1 + self._late
        sources = self.graph.sources(self.rank, self.size, self._graph_step(coming))
        asked = [SendMessage(source, StepReady(coming)) for source in sources if source not in self.gone]
        return [*said, *asked, Reply(ticket, Taken(messages, self.gone))]
