"""Collectives that fail, and how all their members come to the same error.

The member that finds a failure tells all others whom it blames. What they hear about a collective that they have not begun yet is
kept, and ends it when they do:

    peer lost               a collective fails with `PeerLost(rank)` if that peer is a member of it; others go on
    transfer failed         what the wire says; where the two sides mean different collectives, it is a dispute
                            (`disagreement.py`), and told as one
    streams never meet      `RankMismatch` for a collective and all later ones of its channel that are under way

Some collectives are *part of* a round of the whole job, although each has few members: workers of a host combine, then hosts do.
There the loss of any worker leaves all others waiting, one for the other. So a round fails as a whole: whichever part fails, on
any rank, for whatever reason, all ranks are told, and every part of that round that is under way or begins later fails with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from stretto.collectives.messages import TOPIC_FAILED, TOPIC_ROUND_FAILED, Failed, Name, as_error, as_failed, decode, is_later
from stretto.errors import PeerLost, RankMismatch, StrettoError, WireError
from stretto.wire.base import DigestMismatch

if TYPE_CHECKING:
    from stretto.collectives.execute import Communicator
    from stretto.collectives.request import Request
    from stretto.collectives.run import CollectiveRun

HISTORY: Final = 512  # how many ended collectives, and failures of those that have not begun here, are remembered


class Failures:
    """Ends collectives for one communicator, in the thread that drives it."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._wire = communicator.wire
        self._doomed: list[Failed] = []  # failed elsewhere before they began here
        self._failed_rounds: dict[int, Failed] = {}  # channel -> the last round that has failed
        self._wire.listen(TOPIC_FAILED, self._on_failed)
        self._wire.listen(TOPIC_ROUND_FAILED, self._on_round_failed)
        self._wire.on_lost(self._on_lost)

    # -- found here ---------------------------------------------------------------------------------------------------

    def transfer_failed(self, run: CollectiveRun, error: WireError) -> None:
        if isinstance(error, DigestMismatch):
            self._communicator.disagreement.dispute(run)
        elif isinstance(error, PeerLost):
            self._fail_by_loss(run, error)
        else:
            # A wrong size or dtype where the digests agree: not a difference of opinion but a broken peer.
            self.fail(run, error)

    def fail(self, run: CollectiveRun, error: StrettoError) -> None:
        """End it here and, by telling them, at all other members."""
        if not run.pending.done:
            self._communicator.end(run, error)
            self.tell(run.members, run.name, error)

    def tell(self, members: Sequence[int], name: Name, error: StrettoError) -> None:
        self._communicator.tell(members, TOPIC_FAILED, msgspec.msgpack.encode(as_failed(name, error)))

    def refuse(self, request: Request) -> StrettoError | None:
        """Why a collective cannot begin here, if it cannot: it has failed elsewhere, or a member is lost."""
        doom = self.doom_of(request.name) or self._doom_of_round(request.part_of)
        if doom is None and request.plan.size > 1:
            members = self._communicator.members(request)
            doom = self._lost_member(members, request.generation) or self._lost_outsider(request)
            if doom is not None:
                self.tell(members, request.name, doom)  # others may not have lost that peer, and would wait for us
            if doom is not None and request.part_of is not None:
                self.fail_round(request.part_of, doom)
        return doom

    def _lost_outsider(self, request: Request) -> PeerLost | None:
        """A worker whose death fails the round of the whole job that this is part of. One that left in order did its part."""
        if request.part_of is None:
            return None
        return next((error for rank, error in self._wire.lost.items() if not self._wire.said_goodbye(rank)), None)

    def _lost_member(self, members: Sequence[int], generation: int) -> PeerLost | None:
        """A member that is gone, if there is one, or has been since the group was made: its rank may be another worker's now."""
        lost = next((error for rank, error in self._wire.lost.items() if rank in members), None)
        if lost is None and self._wire.generation > generation:
            reason = "another worker has had its rank since the group was made. Make the group again"
            joined = (rank for rank in members if self._wire.joined_in(rank) > generation)
            lost = next((PeerLost(rank, reason) for rank in joined), None)
        return lost

    def _on_lost(self, error: PeerLost) -> None:
        for run in list(self._communicator.runs.values()):
            # A rank that left after doing its part takes nothing with it; one that died may have left any member waiting.
            concerns = error.rank in run.members or run.request.part_of is not None
            if concerns and (not self._wire.said_goodbye(error.rank) or error.rank in run.waiting_for()):
                self._fail_by_loss(run, error)

    def _fail_by_loss(self, run: CollectiveRun, error: PeerLost) -> None:
        if run.disputed_at is None:
            self.fail(run, error)
        else:
            # A member that has heard from all the others raises and leaves: it is the dispute that is to be told.
            self._communicator.disagreement.dispute(run)

    # -- rounds of the whole job --------------------------------------------------------------------------------------

    def fail_round(self, part_of: Name, error: StrettoError) -> None:
        """A part of this round has failed here: so has the rest of it, on all ranks."""
        if self._doom_of_round(part_of) is None:
            failed = as_failed(part_of, error)
            self._communicator.tell(self._communicator.world, TOPIC_ROUND_FAILED, msgspec.msgpack.encode(failed))
            self._end_round(failed)

    def _on_round_failed(self, source: int, body: bytes) -> None:
        failed = decode(source, body, Failed)
        if failed is not None and self._doom_of_round((failed.channel, failed.sequence)) is None:
            self._end_round(failed)

    def _end_round(self, failed: Failed) -> None:
        self._failed_rounds[failed.channel] = failed
        for run in list(self._communicator.runs.values()):
            if not run.pending.done and self._doom_of_round(run.request.part_of) is not None:
                self._communicator.end(run, as_error(failed))

    def _doom_of_round(self, part_of: Name | None) -> StrettoError | None:
        """Why this round has failed, if it has. Other ranks may still be in the one before, which has not."""
        failed = None if part_of is None else self._failed_rounds.get(part_of[0])
        return None if failed is None or part_of is None or part_of[1] != failed.sequence else as_error(failed)

    # -- heard from others --------------------------------------------------------------------------------------------

    def doom_of(self, name: Name) -> StrettoError | None:
        """Why a collective failed elsewhere before it began here, if it has."""
        return next((as_error(failed) for failed in self._doomed if failed.includes(name)), None)

    def _on_failed(self, source: int, body: bytes) -> None:
        failed = decode(source, body, Failed)
        if failed is None:
            return
        communicator, name = self._communicator, (failed.channel, failed.sequence)
        if failed.kind == "mismatch":
            self._end_stream(failed)
        elif name in communicator.runs:
            communicator.end(communicator.runs[name], as_error(failed))
        elif name in communicator.carried_outside:
            communicator.carried_outside[name].error = as_error(failed)
        elif name not in communicator.history:
            self._doom(failed)

    def _doom(self, failed: Failed) -> None:
        self._doomed.append(failed)
        del self._doomed[:-HISTORY]

    # -- streams that never meet --------------------------------------------------------------------------------------

    def fail_streams(self, streams: Mapping[Name, Sequence[int]], error: RankMismatch) -> None:
        """Ranks are in these collectives of different streams, each with its members, and will never meet: end the streams
        there, at all members."""
        for name, members in streams.items():
            self._end_stream(as_failed(name, error), members)

    def _end_stream(self, failed: Failed, tell: Sequence[int] | None = None) -> None:
        """End a collective, now or when it begins here, and with it all later ones of its channel that are under way at any
        member: the buckets of one round leave together, and whoever gets the error waits for the rest of them.

        Several members may come to the same conclusion, and each adds what is under way there. What is heard later about
        something that has ended here adds nothing of ours: this rank may have gone on by then."""
        communicator, name = self._communicator, (failed.channel, failed.sequence)
        if self.doom_of(name) is None:
            if name in communicator.history or communicator.is_forgotten(name):
                return
            for pending in (*communicator.pending(), *communicator.queued()):
                if pending.name[0] == failed.channel and is_later(pending.name[1], failed.last):
                    failed = msgspec.structs.replace(failed, last=pending.name[1])
                    tell = communicator.members(pending.request)
            if tell is not None:
                communicator.tell(tell, TOPIC_FAILED, msgspec.msgpack.encode(failed))
        self._doom(failed)
        for other in communicator.carried_outside.values():
            if failed.includes(other.name):
                other.error = as_error(failed)
        for run in list(communicator.runs.values()):
            if failed.includes(run.name):
                communicator.end(run, as_error(failed))
