"""Fabrics of workers that share a GPU, in real processes: one cannot map its own memory a second time."""

from __future__ import annotations

import pytest
import torch

from fabric.gpu_worker import freed_by_its_owner, refused, sums, sums_of_one_worker, train
from stretto.launching.spawn import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_in_mapped_device_memory_are_right(size: int) -> None:
    assert launch(sums, size, timeout_s=100) == ["mapped device memory and mapped host memory"] * size


def test_memory_stays_readable_when_its_owner_has_freed_it() -> None:
    assert launch(freed_by_its_owner, 2, timeout_s=100) == [3.0, 0.0]


def test_nccl_with_a_worker_of_its_own() -> None:
    assert launch(sums_of_one_worker, 1, "nccl", timeout_s=100) == ["nccl"]


@pytest.mark.parametrize(
    ("how", "says"),
    [("no memory", "OUT_OF_MEMORY"), ("bad handle", "refused cuIpcOpenMemHandle"), ("short", "bytes of memory where")],
)
def test_memory_that_cannot_be_mapped_is_said_and_gradients_go_by_wire(how: str, says: str) -> None:
    lines, others = launch(refused, 2, how, timeout_s=100)
    (line,) = [line for line in lines if "combine what" in line]
    assert line.startswith("WARNING") and "through our wire" in line and says in line
    assert not [line for line in others if "combine what" in line]


def test_by_default_gradients_stay_on_the_gpu_and_are_as_over_the_wire() -> None:
    texts = ["Strategy()", "Strategy(schedule=WaitFree())", "Strategy(aggregate=AllReduce('ring'))"]
    workers = launch(train, 3, texts, timeout_s=100)
    lines = [line for line in workers[0]["log"] if "combine what" in line]
    assert len(lines) == 2 and all("mapped device memory: they share a GPU" in line for line in lines)
    for text in texts:
        assert all(worker[text] == workers[0][text] for worker in workers), f"{text}: workers differ"
        for ours, theirs in zip(workers[0][text], workers[0][texts[-1]], strict=True):
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-6), text
