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
from stretto.launching.detect import Launch
from stretto.launching.membership import Peer
from stretto.testing import run_threads
from stretto.timeouts import Timeouts
from stretto.wire.torch_group import TorchGroupWire
from wire.test_torch_group import gloo_world


def job_on(wire: TorchGroupWire) -> Job:
    launch = Launch(
        rank=wire.rank, world_size=3, local_rank=wire.rank, local_world_size=3, rendezvous=None, secret=None, encrypt=False,
        launcher="stretto",
    )  # fmt: skip
    peers = [Peer(rank, rank, "here", "127.0.0.1:1", 1) for rank in range(3)]
    return Job(launch, peers, wire, Timeouts(arrive_s=30.0), "gloo")


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

    def program(wire: TorchGroupWire) -> list[str]:
        job, texts = job_on(wire), []
        for way, _ in WAYS.values():
            native(job)
            with pytest.raises(RankMismatch) as caught:
                (way if job.rank == 1 else native)(job)
            texts.append(str(caught.value))
        with pytest.raises(RankMismatch):  # both streams were given up, on all ranks
            (native if job.rank == 1 else partial(stream, channel=2, number=0))(job)
        native(job)
        job.close(goodbye=True)
        return texts

    with gloo_world(3) as wires:
        for texts in run_threads(3, program, wires=wires, timeout_s=60):
            for text, (_, odd) in zip(texts, WAYS.values(), strict=True):
                assert odd in text and "all_reduce(float32[4], op=sum, algorithm=native" in text
