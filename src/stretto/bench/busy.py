"""What a collective in the background costs when the main thread is at work: `--busy`.

The communication thread needs the interpreter lock. Pure Python in the main thread gives it up only when asked to (every 5 ms by
default, `sys.getswitchinterval`), torch operations release it while they compute. Each pass is short, so that the end is seen
soon after it happened.
"""

from __future__ import annotations

import torch

from stretto.bench.contenders import Contender, InFlight
from stretto.bench.settings import Load

PASSES = 200


def run_under(load: Load, contender: Contender, tensor: torch.Tensor) -> None:
    """Run the contender to its end while this thread is idle, in pure Python, or in torch operations."""
    if load == "idle":
        contender.run(tensor)
        return
    pending = contender.start(tensor)
    if load == "python":
        _count_until_done(pending)
    else:
        _multiply_until_done(pending)
    pending.wait()


def _count_until_done(pending: InFlight) -> int:
    number = 1
    while not pending.is_done():
        for _ in range(PASSES):
            number = (number * 31 + 7) & 0xFFFF
    return number


def _multiply_until_done(pending: InFlight) -> None:
    a, b = torch.ones(96, 96), torch.ones(96, 96)
    while not pending.is_done():
        torch.mm(a, b)
