"""`monitored_barrier`: a barrier whose first member finds out who is missing, and tells those that came.

Every operation here names a member that did not come. This one names all of them: rank 0 of the group receives a word from each
other member until the deadline, and then tells each that came who did not. All of these raise the same error; where a member has
died, all raise `PeerLost`. It costs two messages for each member, one after the other, where a barrier takes log2 P steps; torch
has it for debugging.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from stretto.collectives.group import Group
from stretto.errors import PeerLost, StrettoError, WireTimeout
from stretto.torch_backend.operation import NotYet, Operation
from stretto.torch_backend.pairs import Pairs

MISSING: Final = 1  # in the first member's word, at the place of a member that has not come
LOST: Final = 2  # of one that is dead
GRACE_S: Final = 5.0  # that those who came wait longer for the first member's word


def monitored_barrier(pairs: Pairs, group: Group, number: int, timeout_s: float, *, wait_all_ranks: bool) -> None:
    """Return when all members are here; raise `WireTimeout` that names who is not. `number`: how many there were before."""
    tag = -1 - number  # programs use numbers from zero on
    if group.rank == 0:
        _ask_everybody(pairs, group, tag, timeout_s, wait_all_ranks=wait_all_ranks)
    else:
        _report(pairs, group, tag, timeout_s)


def _ask_everybody(pairs: Pairs, group: Group, tag: int, timeout_s: float, *, wait_all_ranks: bool) -> None:
    deadline = time.monotonic() + timeout_s
    others = range(1, group.size)
    words = {place: pairs.receive(_empty(), [place], tag, max(timeout_s, 1e-3), outlives=True)[0] for place in others}
    verdict = torch.zeros(group.size, dtype=torch.uint8, device="cpu")
    failure: StrettoError | None = None
    for place, word in words.items():
        try:
            word.wait(max(1e-6, deadline - time.monotonic()))
        except (NotYet, WireTimeout):
            verdict[place] = MISSING
            if not wait_all_ranks:
                break
        except StrettoError as error:
            verdict[place] = LOST if isinstance(error, PeerLost) else MISSING
            failure = error
            break
    _tell(pairs, words, verdict, tag)
    if failure is not None:
        raise failure
    _raise_if(verdict, group, timeout_s)


def _tell(pairs: Pairs, words: Mapping[int, Operation], verdict: Tensor, tag: int) -> None:
    """All that have come, or may still come after the first that has not, so that nobody waits for the first member in vain."""
    told = []
    for place, word in words.items():
        if not verdict[place]:
            with contextlib.suppress(PeerLost):  # another one: those who live are to know all the same
                told.append((word, pairs.send(verdict, place, tag, outlives=True)))
    for word, one in told:
        if word.has_succeeded:
            with contextlib.suppress(PeerLost):
                one.wait()


def _report(pairs: Pairs, group: Group, tag: int, timeout_s: float) -> None:
    patience_s = 2 * timeout_s + GRACE_S
    word = pairs.send(_empty(), 0, tag, patience_s, outlives=True)
    verdict = torch.zeros(group.size, dtype=torch.uint8, device="cpu")
    try:
        pairs.receive(verdict, [0], tag, patience_s, outlives=True)[0].wait()
    except WireTimeout as error:
        why = f"Rank 0 timed out in monitoredBarrier after {patience_s:g} s."
        raise WireTimeout(group.ranks[0], "monitored_barrier", error.waited_s, why) from error
    _raise_if(verdict, group, timeout_s)
    word.wait()


def _raise_if(verdict: Tensor, group: Group, timeout_s: float) -> None:
    lost, missing = ((verdict == what).nonzero().flatten().tolist() for what in (LOST, MISSING))
    if lost:
        raise PeerLost(group.ranks[lost[0]], f"so rank {group.ranks[0]} found in monitored_barrier.")
    if missing:
        who = ", ".join(str(group.ranks[place]) for place in missing)
        late = f"Rank{'s' if len(missing) > 1 else ''} {who} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms."
        text = f"Rank {group.ranks[0]} timed out in monitoredBarrier: {late}"
        raise WireTimeout(group.ranks[missing[0]], "monitored_barrier", timeout_s, text)


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")
