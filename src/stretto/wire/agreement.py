"""All ranks say what they are about to do, and go ahead only if it is the same.

For operations that cannot be checked while they run: a torch backend given different sizes on two ranks ends the process
(gloo) or hangs (NCCL). One small message from every rank to every other, so P (P - 1) messages and one latency:

    post "what" to everybody  ->  wait for everybody's "what"  ->  all alike: go on
                                                               ->  else: `RankMismatch`, the same text on every rank

A rank that gives up while it waits says so, with whom it blames, and the others raise the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stretto.errors import PeerLost, RankMismatch, StrettoError, WireError, WireTimeout
from stretto.launching.membership import ranks_text
from stretto.wire.base import Wire

REMEMBERED: Final = 512  # agreements that others have begun and this rank has not
log = logging.getLogger("stretto.wire")


class Said(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    what: str
    failure: str = ""  # "", "lost", "timeout", "mismatch" or "refused"
    culprit: int = -1
    text: str = ""


def rank_mismatch(said: Mapping[int, str], places: Mapping[int, str] | None = None) -> RankMismatch:
    """The error that lists who said what: `said[rank]` is what that rank believes everybody is doing, `places[rank]` where."""
    lines = [
        f"  {ranks_text(ranks)}: {what}{_called_at({rank: (places or {}).get(rank, '') for rank in ranks})}"
        for what, ranks in _alike(said).items()
    ]
    return RankMismatch(
        "ranks called different collectives, so none of them was carried out:\n"
        + "\n".join(lines)
        + "\nAll ranks must make the same calls in the same order, with tensors of the same length and dtype."
    )


def _alike(said: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have said the same, by what they have said."""
    speakers: dict[str, list[int]] = {}
    for rank in sorted(said):
        speakers.setdefault(said[rank], []).append(rank)
    return speakers


def _called_at(places: Mapping[int, str]) -> str:
    known = _alike({rank: place for rank, place in places.items() if place})
    if len(known) == 1:
        return f", called at {next(iter(known))}"
    return "".join(f"\n    {ranks_text(ranks)} at {place}" for place, ranks in known.items())


class Agreement:
    """Agreements of one kind, told apart by their sequence number. Driven by the thread that drives the wire."""

    def __init__(self, wire: Wire, topic: int) -> None:
        self._wire = wire
        self._topic = topic
        self._heard: dict[int, dict[int, Said]] = {}
        wire.listen(topic, self._on_said)

    def reach(
        self, sequence: int, what: str, timeout_s: float, given_up: Callable[[], StrettoError | None] = lambda: None
    ) -> None:
        """Return when every rank has said `what`; raise what keeps them from it. `given_up`: why it cannot come about, if the
        caller has found out otherwise."""
        wire = self._wire
        deadline = wire.now() + timeout_s
        if given_up() is None:
            self._say(Said(sequence, what))
        try:
            while (problem := given_up()) is not None or (missing := self._missing(sequence)):
                if problem is not None:
                    self.fail(sequence, problem)
                    raise problem
                if wire.now() >= deadline:
                    raise WireTimeout(missing[0], what, timeout_s)
                wire.progress(min(1.0, deadline - wire.now()))
        except (PeerLost, WireTimeout) as error:
            self.fail(sequence, error)
            raise
        said = {rank: heard.what for rank, heard in self._heard.pop(sequence, {}).items()} | {wire.rank: what}
        if len(set(said.values())) > 1:
            raise rank_mismatch(said)

    def fail(self, sequence: int, error: StrettoError) -> None:
        """Tell everybody that this rank does not take part, and why."""
        if isinstance(error, PeerLost):
            self._say(Said(sequence, "", "lost", error.rank, error.reason))
        elif isinstance(error, WireTimeout):
            self._say(Said(sequence, "", "timeout", error.rank, error.tag))
        elif isinstance(error, RankMismatch):
            self._say(Said(sequence, "", "mismatch", self._wire.rank, str(error)))
        else:
            self._say(Said(sequence, "", "refused", self._wire.rank, str(error)))
        self._heard.pop(sequence, None)

    def _missing(self, sequence: int) -> list[int]:
        """The ranks that have not spoken. Raises as soon as one of them cannot, or another rank has given up."""
        heard = self._heard.get(sequence, {})
        for source, said in heard.items():
            if said.failure:
                self._heard.pop(sequence)
                raise _as_error(source, said)
        missing = [rank for rank in range(self._wire.world_size) if rank != self._wire.rank and rank not in heard]
        for rank in missing:
            if rank in self._wire.lost:
                raise self._wire.lost[rank]
        return missing

    def _say(self, said: Said) -> None:
        body = msgspec.msgpack.encode(said)
        for rank in range(self._wire.world_size):
            if rank != self._wire.rank:
                self._wire.post(rank, self._topic, body)

    def _on_said(self, source: int, body: bytes) -> None:
        try:
            said = msgspec.msgpack.decode(body, type=Said)
        except msgspec.MsgspecError as problem:
            log.warning("ignored a malformed agreement from rank %d: %s", source, problem)
            return
        self._heard.setdefault(said.sequence, {})[source] = said
        while len(self._heard) > REMEMBERED:
            del self._heard[next(iter(self._heard))]


def _as_error(source: int, said: Said) -> StrettoError:
    if said.failure == "lost":
        return PeerLost(said.culprit, said.text)
    if said.failure == "mismatch":
        return RankMismatch(said.text)
    if said.failure == "timeout":
        return WireError(f"rank {source} gave up waiting for rank {said.culprit} in {said.text}")
    return WireError(f"rank {source} did not take part: {said.text}")
