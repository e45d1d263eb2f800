"""`algorithm="auto"`: a group measures its links and tries out what looks best there, once, and keeps the table.

It is done among the group's members alone, when they first need it, on a channel of its own: many small collectives, which must
not meet what the caller's other threads do in the group.
"""

from __future__ import annotations

import time
from typing import TypeVar

import msgspec
import torch

from stretto.collectives import calls
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.plan.choose import Choices, Trial, choose, trials
from stretto.plan.costs import LinkCosts
from stretto.plan.network import measure, slowest

TURNS = 6  # of each algorithm that is tried out; the first one warms up
T = TypeVar("T")


def chosen_for(group: Group, what: str) -> Choices:
    """The group's table. The first call makes it: all members must make it together, for one `what`."""
    if group.choices is None:
        calls.start_barrier(group, f" to choose for {what}").wait()
        group.choices = _make_choices(group.to_choose())
    assert isinstance(group.choices, Choices)
    return group.choices


def _make_choices(group: Group) -> Choices:
    size, per_host, segment = group.size, group.workers_per_host, group.segment_bytes
    mine = measure(
        size,
        lambda: calls.start_barrier(group).wait(),
        lambda probe: group.run(Kind.ALL_REDUCE, probe, "ring"),
        lambda seconds: max(calls.gather_object(group, seconds)),
    )
    everybody = [msgspec.convert(one, LinkCosts) for one in calls.gather_object(group, msgspec.to_builtins(mine))]
    link = slowest(everybody)
    # All compute the same from the same numbers; the first member's word counts, should a rounding differ between machines.
    wanted = as_first(group, trials(size, link, segment, per_host), list[Trial])
    tried = _try_out(group, wanted)
    return as_first(group, choose(size, link, segment, per_host, tried), Choices)


def as_first(group: Group, value: T, kind: type[T]) -> T:
    """The first member's value, on all of them."""
    return msgspec.convert(calls.gather_object(group, msgspec.to_builtins(value))[0], kind)


def _try_out(group: Group, wanted: list[Trial]) -> dict[Trial, float]:
    """How long each trial takes: the median over its turns of the slowest member's time. All take turns, so that whatever else
    the machines do hits all of them alike."""
    if not wanted:
        return {}
    times = torch.tensor([[_time(group, trial) for trial in wanted] for _ in range(TURNS)], dtype=torch.float64, device="cpu")
    medians = calls.start_all_gather(group, times).wait().amax(dim=0)[1:].median(dim=0).values
    return dict(zip(wanted, medians.tolist(), strict=True))


def _time(group: Group, trial: Trial) -> float:
    probe = torch.zeros(trial.num_bytes // 4, dtype=torch.float32, device="cpu")
    calls.start_barrier(group).wait()
    begin = time.perf_counter()
    group.run(Kind.ALL_REDUCE, probe, trial.algorithm)
    return time.perf_counter() - begin
