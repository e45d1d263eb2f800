"""Members that mean different things by the same collective: found out, said by everybody, and told in one error.

Every message carries a checksum of what its sender believes the collective to be (`Request.belief`), and large collectives begin
by saying it in full. A member that hears another belief than its own opens a dispute: it tells all members what it believes and
where in the program it is. Members that hear of a dispute do the same. When all have spoken, or `ASK_S` after it began, it is
settled (`failures.py`) that all raise a `RankMismatch`, which lists the beliefs and the places.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from stretto.collectives.messages import Believes, Failed, Name
from stretto.collectives.mismatch import rank_mismatch
from stretto.collectives.recent import Recent
from stretto.collectives.request import OngoingCollective

if TYPE_CHECKING:
    from stretto.collectives.failures import FailureAgreement

EARLY: Final = 512  # of how many collectives that have not begun here is kept what was said about them

log = logging.getLogger("stretto.collectives")


class Disagreement:
    """What was said about collectives that members disagree on: a part of the machine of one rank."""

    def __init__(self, machine: FailureAgreement) -> None:
        self._machine = machine
        self._roster = machine.roster
        self._disputes: dict[Name, tuple[float, dict[int, Believes]]] = {}  # since when; of collectives under way here
        self._early: Recent[Name, dict[int, Believes]] = Recent(EARLY)  # of collectives that have not begun here

    def is_open(self, name: Name) -> bool:
        return name in self._disputes

    def forget(self, name: Name) -> None:
        self._disputes.pop(name, None)
        self._early.pop(name, None)

    def has_begun(self, now: float, collective: OngoingCollective) -> None:
        """Take up what was said before it began here."""
        for rank, said in self._early.pop(collective.name, {}).items():
            self.heard(now, rank, said)

    def heard(self, now: float, source: int, said: Believes) -> None:
        name, machine = said.name, self._machine
        collective = machine.under_way.get(name)
        if collective is not None:
            if source in machine.members(collective.request):
                self.open(now, collective, {source: said})
        elif name in machine.history:
            if not said.is_answer:
                machine.send(source, Believes(*name, machine.history[name], "", is_answer=True))
        elif not machine.history.had(name):
            self._early[name] = {**self._early.get(name, {}), source: said}

    def open(self, now: float, collective: OngoingCollective, heard: dict[int, Believes] | None = None) -> None:
        """Say what we believe, if we have not yet; and take note of what others do."""
        machine, name = self._machine, collective.name
        if name not in self._disputes:
            mine = Believes(*name, collective.belief, machine.inquiry.place_in(name))
            self._disputes[name] = now, {self._roster.rank: mine}
            collective.failing = True
            machine.tell(machine.members(collective.request), mine)
        said = self._disputes[name][1]
        for rank, believes in (heard or {}).items():
            if believes.place is not None or rank not in said:  # its own word counts more than what was heard of it
                said[rank] = believes
        self.try_to_conclude(now, collective)

    def try_to_conclude(self, now: float, collective: OngoingCollective) -> None:
        since, said = self._disputes[collective.name]
        spoken = {rank for rank, each in said.items() if each.place is not None}
        if spoken >= self._machine.others(collective.request) or self._machine.inquiry.is_over(now, since):
            beliefs = {rank: (each.belief, each.place or "") for rank, each in said.items()}
            error = rank_mismatch(*({rank: each[which] for rank, each in beliefs.items()} for which in (0, 1)))
            self._machine.found(now, collective.request, error, beliefs)

    def say_that_it_had_ended(self, verdict: Failed) -> None:
        """A rank that only had to send (the root of a small broadcast) has returned when others disagree: all that is left is to
        say so."""
        me, ours = self._roster.rank, self._machine.history[verdict.name]
        other = next((rank for rank, (belief, _) in sorted(verdict.beliefs.items()) if belief != ours), None)
        if other is not None:
            log.error(
                "rank %d had done its part of a collective when rank %d disagreed about it:\n  rank %d: %s\n  rank %d: %s\n"
                "All ranks must make the same calls in the same order, with tensors of the same length and dtype.",
                me, other, me, ours, other, verdict.beliefs[other][0],
            )  # fmt: skip
