"""The error that every rank gets when they have called different collectives: who is where."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.errors import RankMismatch
from stretto.launching.peers import ranks_text


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
