"""Contenders take turns, so that whatever else the machine does hits all of them alike.

    round k: each contender once, in an order rotated by k

Between ranks, the time of a turn is that of the slowest. What is shown of a contender is the median over rounds and the middle
half; two of them are compared round by round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch

from stretto.errors import ConfigurationError
from stretto.job import Job

Turn = Callable[[], float]  # one contender's: seconds


def take_turns(turns: Sequence[Turn], rounds: int) -> list[list[float]]:
    """The seconds of each contender, one number per round."""
    seconds: list[list[float]] = [[] for _ in turns]
    for number in range(rounds):
        for offset in range(len(turns)):
            index = (number + offset) % len(turns)
            seconds[index].append(turns[index]())
    return seconds


def timed(action: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Seconds for each time; what the action has left the device to do is part of it."""
    begin = time.perf_counter()
    for _ in range(times):
        action()
    wait_for(device)
    return (time.perf_counter() - begin) / times


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_slowest_rank(job: Job, seconds: list[list[float]]) -> list[list[float]]:
    """The same on all ranks. Collective."""
    slowest: list[list[float]] = job.all_gather(torch.tensor(seconds, dtype=torch.float64)).amax(dim=0).tolist()
    return slowest


def quartiles(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return first, third


def check_device(device: str) -> None:
    """Workers without a GPU would be given their CPU, and its times would be taken for a GPU's."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "--device cuda: torch sees no GPU here (`stretto doctor` says what it sees). Leave the option out, or run it where "
            "there is one."
        )


def now() -> str:
    """The date of a report."""
    return datetime.now(UTC).isoformat(timespec="seconds")
