"""Workers that share a GPU, in real processes: autograd has one thread per device, which threads as workers would block."""

from __future__ import annotations

import pytest
import torch

from engine.gpu_worker import different_ways, gradients_of_three_steps, weights_after
from stretto.launching.spawn import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RING = "aggregate=AllReduce('ring')"  # "auto" may choose otherwise on the CPU, and then adds in another order
PLAIN = [f"Strategy({RING}, {more})" for more in ("schedule=WaitFree()", "", "compress=Float16()", "compress=Int8()")]
TIPPING = [  # a sign or a choice may tip over between a CPU and a GPU
    f"Strategy(compress={compress}, schedule=WaitFree())"
    for compress in (
        "ErrorFeedback(Sign(64))", "ErrorFeedback(TopK(0.1))", "ErrorFeedback(PowerSGD(2))", "DGC(0.1)", "OneBitAdam(1)",
        "EF21(TopK(0.1))", "QSGD(4)", "WarmUp(1, ErrorFeedback(OneBit()))",
    )
]  # fmt: skip


def test_workers_on_a_gpu_end_with_the_same_bits_and_as_on_a_cpu() -> None:
    texts = [*PLAIN, *TIPPING]
    on_gpu = launch(gradients_of_three_steps, 3, texts, "cuda", timeout_s=100)
    on_cpu = launch(gradients_of_three_steps, 3, texts, "cpu", timeout_s=100)
    for text in texts:
        assert all(worker[text] == on_gpu[0][text] for worker in on_gpu), f"{text}: workers differ"
        assert len({tuple(step) for step in on_gpu[0][text]}) == 3
    for text in PLAIN:
        for ours, theirs in zip(on_gpu[0][text], on_cpu[0][text], strict=True):
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-2, atol=1e-4), text


def test_a_bad_gradient_on_a_gpu_is_everybodys() -> None:
    texts = ["Strategy(compress=ErrorFeedback(Sign(64)), schedule=WaitFree())"]
    for worker in launch(gradients_of_three_steps, 2, texts, "cuda", 1, timeout_s=60):
        assert all(value != value for value in worker[texts[0]][1])  # NaN, all of them
        assert all(value == value for value in worker[texts[0]][2])


@pytest.mark.parametrize("other_stream", [False, True])
def test_across_the_barrier_on_a_gpu_weights_are_as_with_it(other_stream: bool) -> None:
    barrier = f"Strategy({RING}, schedule=WaitFree())"
    orders = ("Priority(partition=256, credit=256)", "Priority()", "Caramel()", "Tac(cross_barrier=True)", "Merged()")
    crossing = [f"Strategy({RING}, schedule={order})" for order in orders]
    lossy = [f"Strategy(compress=ErrorFeedback(PowerSGD(2)), schedule={order})" for order in ("WaitFree()", "Priority()")]
    everybody = launch(weights_after, 2, [barrier, *crossing, *lossy], "cuda", 12, other_stream, timeout_s=100)
    for worker in everybody:
        for text in crossing:
            assert worker[text] == worker[barrier], text
            [backward_s] = worker[f"{text}, seconds of backward"]  # of events on the GPU
            assert 0 < backward_s < 10
        assert worker[lossy[0]] == everybody[0][lossy[0]] and worker[lossy[1]] == everybody[0][lossy[1]]
        assert torch.allclose(torch.tensor(worker[lossy[0]]), torch.tensor(worker[lossy[1]]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("strategy", "where"), [(f"Strategy({RING})", "all_reduce("), ("Strategy()", "for gradients")])
def test_a_backward_that_waits_in_a_thread_of_autograds_is_found_out_too(strategy: str, where: str) -> None:
    for text in launch(different_ways, 2, "cuda", strategy, timeout_s=60):
        lines = text.splitlines()
        assert any("rank 0: " in line and where in line for line in lines) and any("rank 1: barrier(" in line for line in lines)
        assert text.count("gpu_worker.py:") == 2
