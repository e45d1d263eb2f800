"""Tensors that are not flat host memory: strided ones everywhere, CUDA ones where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from stretto.collectives.staging import Staging
from stretto.job import Job
from stretto.testing import run_jobs

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_contiguous_tensor_is_used_where_it_is() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    flat, bring_back = Staging().borrow(tensor)
    flat += 1
    bring_back()
    assert torch.equal(tensor, torch.arange(1.0, 7.0).view(2, 3))


def test_a_strided_tensor_gets_its_result_back() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    expected = tensor * 2
    flat, bring_back = Staging().borrow(tensor)
    flat *= 2
    bring_back()
    assert torch.equal(tensor, expected)


def _reduce_on_a_stream(job: Job) -> list[float]:
    """The sum must see what the caller's stream computes just before, and what it computes after must see the sum."""
    results = []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for length in (1_000_003, 17, 1_000_003):
            tensor = torch.zeros(length, device="cuda")
            for _ in range(20):  # work that is still queued when all_reduce is called
                tensor += torch.ones(length, device="cuda")
            job.all_reduce(tensor, op="sum", algorithm="ring")
            tensor *= 2
            results.append(float(tensor.max()))
            assert float(tensor.min()) == results[-1]
    return results


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_the_callers_stream_is_respected_and_buffers_are_reused(self, size: int) -> None:
        for results in run_jobs(size, _reduce_on_a_stream):
            assert results == [40.0 * size] * 3

    def test_strided_and_half_precision_tensors(self) -> None:
        def reduce(job: Job) -> bool:
            tensor = torch.full((64, 32), float(job.rank + 1), dtype=torch.bfloat16, device="cuda").t()
            job.all_reduce(tensor, op="sum", algorithm="butterfly")
            return bool((tensor == 6).all())

        assert all(run_jobs(3, reduce))

    def test_what_is_lent_comes_back_when_it_is_ready(self) -> None:
        staging = Staging()
        tensor = torch.arange(1_000_000.0, device="cuda")
        host, ready, bring_back = staging.lend(tensor)
        assert ready is not None and bring_back is not None
        torch.cuda.synchronize()
        assert ready()
        host *= 3
        bring_back()
        assert torch.equal(tensor.cpu(), torch.arange(1_000_000.0) * 3)

    def test_the_tail_of_a_lent_tensor_stays_on_the_host(self) -> None:
        staging = Staging()
        for number in range(3):  # pinned memory is used again
            flat, tail = torch.full((10,), float(number), device="cuda"), torch.tensor([7.0, 8.0])
            host, ready, bring_back = staging.lend(flat, tail)
            assert ready is not None and bring_back is not None
            torch.cuda.synchronize()
            assert ready() and host.tolist() == [float(number)] * 8 + [7.0, 8.0]
            host.mul_(2.0)
            bring_back()
            assert tail.tolist() == [14.0, 16.0]
            assert flat.tolist() == [2.0 * number] * 8 + [float(number)] * 2
