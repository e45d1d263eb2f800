"""Members that mean different things by the same collective: found out, said by everybody, and told in one error.

Every message carries a checksum of what its sender believes the collective to be (`Request.belief`), and large collectives begin
by saying it in full. A member that hears another belief than its own opens a dispute: it tells all members what it believes and
where in the program it is. Members that hear of a dispute do the same. When all have spoken, or `ASK_S` after it began, all raise
the same `RankMismatch`, which lists the beliefs and the places.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from stretto.collectives.messages import TOPIC_BELIEF, Begun, Name, decode
from stretto.collectives.mismatch import rank_mismatch

if TYPE_CHECKING:
    from stretto.collectives.execute import Communicator
    from stretto.collectives.request import Outside
    from stretto.collectives.run import CollectiveRun

log = logging.getLogger("stretto.collectives")


class Disagreement:
    """What was heard about collectives that members disagree on, at one communicator, in the thread that drives it."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._wire = communicator.wire
        self._heard: dict[Name, dict[int, Begun]] = {}  # of collectives that have not begun here, or have ended
        self._wire.listen(TOPIC_BELIEF, self._on_belief)

    def forget(self, name: Name) -> None:
        self._heard.pop(name, None)

    def has_begun(self, run: CollectiveRun) -> None:
        """Take up what was said before it began here."""
        for rank, said in self._heard.pop(run.name, {}).items():
            self.heard_belief(run, rank, said.belief, said.place)

    def has_begun_outside(self, other: Outside) -> None:
        for rank, said in self._heard.pop(other.name, {}).items():
            self.heard_outside(other, rank, said.belief)

    def _on_belief(self, source: int, body: bytes) -> None:
        said = decode(source, body, Begun)
        if said is None:
            return
        communicator, name = self._communicator, (said.channel, said.sequence)
        if name in communicator.runs:
            self.heard_belief(communicator.runs[name], source, said.belief, said.place)
        elif name in communicator.carried_outside:
            self.heard_outside(communicator.carried_outside[name], source, said.belief)
        elif name in communicator.history:
            self.heard_afterwards(name, source, said.belief)
        else:
            self._heard.setdefault(name, {})[source] = said

    def heard_belief(self, run: CollectiveRun, source: int, belief: str, place: str | None = None) -> None:
        """A member believes this collective to be something. With a place it has heard of the dispute, and says it to all."""
        if source in run.members:
            run.beliefs[source] = belief
            if place is not None:
                run.places[source] = place
            self.dispute(run)

    def heard_outside(self, other: Outside, source: int, belief: str) -> None:
        if other.error is None and belief != other.belief:
            other.error = rank_mismatch({self._wire.rank: other.belief, source: belief})
            body = msgspec.msgpack.encode(Begun(*other.name, other.belief))
            self._communicator.tell(self._communicator.world, TOPIC_BELIEF, body)

    def heard_afterwards(self, name: Name, source: int, belief: str) -> None:
        """A dispute about what has ended here: answer each peer once. A rank that only had to send (the root of a small
        broadcast) has returned by then: all that is left is to say so."""
        heard = self._heard.setdefault(name, {})
        if source in heard:
            return
        ours = self._communicator.history[name]
        if belief != ours and all(other.belief == ours for other in heard.values()):  # else it was said, or raised, before
            log.error(
                "rank %d had done its part of a collective when rank %d disagreed about it:\n  rank %d: %s\n  rank %d: %s\n"
                "All ranks must make the same calls in the same order, with tensors of the same length and dtype.",
                self._wire.rank, source, self._wire.rank, ours, source, belief,
            )  # fmt: skip
        heard[source] = Begun(*name, belief)
        mine = heard.get(self._wire.rank, Begun(*name, ours))
        self._wire.post(source, TOPIC_BELIEF, msgspec.msgpack.encode(mine))

    def dispute(self, run: CollectiveRun) -> None:
        communicator = self._communicator
        if run.disputed_at is None:
            run.disputed_at = self._wire.now()
            place = run.places[self._wire.rank] = communicator.inquiry.place_in(run.pending)
            communicator.check_soon()
            communicator.tell(run.members, TOPIC_BELIEF, msgspec.msgpack.encode(Begun(*run.name, run.belief, place)))
        if run.places.keys() >= set(communicator.inquiry.others(run)):
            self.conclude(run)

    def conclude(self, run: CollectiveRun) -> None:
        """End the collective with what was said until now."""
        if run.pending.done:
            return
        beliefs = {**run.beliefs, self._wire.rank: run.belief}
        self._communicator.end(run, rank_mismatch(beliefs, run.places))
        self._heard[run.name] = {rank: Begun(*run.name, what, run.places.get(rank, "")) for rank, what in beliefs.items()}
