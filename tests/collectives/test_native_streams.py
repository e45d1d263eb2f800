"""The torch backend's own collectives among ours: a rank that is elsewhere is found out there too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from collectives.test_streams import stream
from stretto.collectives import inquiry
from stretto.errors import RankMismatch
from stretto.job import Job
from stretto.timeouts import Timeouts
from wire.test_torch_group import run


def native(job: Job, label: str = "") -> None:
    tensor = torch.full((4,), float(job.rank))
    assert job.all_reduce(tensor, "sum", "native", label=label).tolist() == [3.0] * 4


WAYS: dict[str, tuple[Callable[[Job], None], str]] = {
    "a barrier, which has the same number": (lambda job: job.barrier(), "rank 1: barrier("),
    "the same of another model": (
        lambda job: native(job, " of another model"),
        "algorithm=native, world_size=3) of another model",
    ),
    "another stream": (lambda job: stream(job, 2, 0), "rank 1: all_reduce(float32[10]"),
}


def test_a_rank_elsewhere_while_others_are_in_a_native_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "ASK_S", 0.05)

    def program(job: Job) -> list[str]:
        texts = []
        for way, _ in WAYS.values():
            native(job)
            with pytest.raises(RankMismatch) as caught:
                (way if job.rank == 1 else native)(job)
            texts.append(str(caught.value))
        with pytest.raises(RankMismatch):  # both streams were given up, on all ranks
            (native if job.rank == 1 else partial(stream, channel=2, number=0))(job)
        native(job)
        return texts

    for texts in run(3, program, Timeouts(arrive_s=30.0)):
        for text, (_, odd) in zip(texts, WAYS.values(), strict=True):
            assert odd in text and "all_reduce(float32[4], op=sum, algorithm=native" in text
