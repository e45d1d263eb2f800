"""Workers that share a GPU, in real processes: autograd has one thread per device, which threads as workers would block."""

from __future__ import annotations

import pytest
import torch

from engine.gpu_worker import different_ways, gradients_of_three_steps, in_slices, trained_in, weights_after
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


def test_local_steps_on_a_gpu_end_with_the_same_bits_and_as_on_a_cpu() -> None:
    plain = [f"Strategy({RING}, sync=LocalSGD(4{more}))" for more in ("", ", outer=Nesterov(0.7, 0.9)", ", start_after=5")]
    lossy = "Strategy(sync=LocalSGD(4), compress=ErrorFeedback(Sign(64)))"
    on_gpu = launch(weights_after, 2, [*plain, lossy], "cuda", 13, True, timeout_s=100)
    on_cpu = launch(weights_after, 2, [*plain, lossy], "cpu", 13, False, timeout_s=100)
    for text in (*plain, lossy):  # the last exchange was after step 12, or 13
        assert (on_gpu[0][text] == on_gpu[1][text]) == ("start_after" in text)
    for text in plain:
        assert torch.allclose(torch.tensor(on_gpu[0][text]), torch.tensor(on_cpu[0][text]), rtol=1e-3, atol=1e-4), text


IN_STEP = [  # what they compute does not depend on who is faster
    "dpsgd()", "sgp()", "choco_sgd(Sign())", "noloco(5)", "moshpit(size=2)", "streaming_diloco(every=8, fragments=2, overlap=1)",
    f"Strategy({RING}, sync=StaleSynchronous(1))", "Strategy(aggregate=ParameterServer())",
    "Strategy(aggregate=Hierarchy(outer=ParameterServer(), group_size=2))",
]  # fmt: skip
WHENEVER = [
    "adpsgd()", "wagma(size=2, bound=4)", "overlap_sgp()", "downpour()", "ssp(2)", "softsync()",
    "Strategy(aggregate=ParameterServer(), sync=LocalSGD(4))",
]  # fmt: skip


@pytest.mark.parametrize("text", IN_STEP)
def test_ways_that_keep_step_train_on_a_gpu_as_on_a_cpu(text: str) -> None:
    on_gpu = launch(trained_in, 2, [text], "cuda", 20, timeout_s=100)
    on_cpu = launch(trained_in, 2, [text], "cpu", 20, timeout_s=100)
    assert on_gpu[0][text] == on_gpu[1][text] and on_gpu[0][text][0] < 0.8
    assert torch.allclose(torch.tensor(on_gpu[0][text]), torch.tensor(on_cpu[0][text]), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("text", WHENEVER)
def test_ways_that_wait_for_nobody_train_on_a_gpu(text: str) -> None:
    workers = launch(trained_in, 2, [text], "cuda", 20, timeout_s=100)
    assert all(worker[text][0] < 0.8 for worker in workers)  # loss over that of the beginning


@pytest.mark.parametrize(("strategy", "where"), [(f"Strategy({RING})", "all_reduce("), ("Strategy()", "for gradients")])
def test_a_backward_that_waits_in_a_thread_of_autograds_is_found_out_too(strategy: str, where: str) -> None:
    for text in launch(different_ways, 2, "cuda", strategy, timeout_s=60):
        lines = text.splitlines()
        assert any("rank 0: " in line and where in line for line in lines) and any("rank 1: barrier(" in line for line in lines)
        assert text.count("gpu_worker.py:") == 2


ON_THE_DEVICE = {1: 12.0, 2: 8.0, 3: 8.0}  # of AdamW in float32 on two workers: 4 + 4 + 8/2, 4 + 4/2 + 8/2, 16/2
OFFLOADED = {1: 8.0, 2: 6.0, 3: 2.0}  # state is not there, at stage 3 nor are slices of parameters


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_state_is_pinned_host_memory_and_trains_as_it_does_on_the_device(stage: int) -> None:
    schedule = f"{RING}, schedule=Buckets(bytes=16384, first_bytes=16384)"  # a layer each
    plain, offloaded = (f"Strategy({schedule}, shard=Zero({stage}{more}))" for more in ("", ", offload='cpu'"))
    expected = launch(in_slices, 2, plain, "cuda", 10, timeout_s=100)
    found = launch(in_slices, 2, offloaded, "cuda", 10, timeout_s=100)
    assert found[0]["weights"] == found[1]["weights"]
    assert torch.allclose(torch.tensor(found[0]["weights"]), torch.tensor(expected[0]["weights"]), rtol=1e-4, atol=1e-5)
    for one, other in zip(expected, found, strict=True):
        assert one["where"] == ["cuda"] and other["where"] == ["cpu"] and other["pinned"]
        for worker, bytes_of_state in ((one, ON_THE_DEVICE[stage]), (other, OFFLOADED[stage])):
            assert bytes_of_state * 0.99 < worker["bytes"] < bytes_of_state * 1.05 + 0.6  # and two buckets, activations
