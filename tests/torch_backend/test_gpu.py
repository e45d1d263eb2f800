"""On a GPU: collectives on CUDA tensors, the order of streams, futures, and FSDP2 and DDP of several workers that share it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from largest import largest
from stretto.compress.int8 import Int8
from stretto.torch_backend.options import GroupOptions
from stretto.torch_backend.process_group import StrettoGroup
from torch_backend.groups import run_groups

pytestmark = [
    pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]  # fmt: skip


def _everything(group: StrettoGroup, length: int) -> None:
    rank, size = group.rank(), group.size()
    x = torch.arange(float(size * length), device="cuda").view(size, length) % 13
    for _ in range(3):  # pinned memory is used again
        summed = x[rank].clone()
        work = group.allreduce([summed])
        work.wait()
        assert (summed * 2).equal(x.sum(0) * 2)  # on the caller's stream, at once
        gathered = torch.empty(size * length, device="cuda")
        group.all_gather_single(gathered, x[rank].clone()).wait()
        assert gathered.view(size, length).equal(x)
        mine = torch.empty(length, device="cuda")
        given = x.flatten().clone()
        assert group.reduce_scatter_single(mine, given).get_future().wait()[0] is mine
        assert mine.equal(size * x[rank]) and given.equal(x.flatten())
        arrived = torch.empty(size * length, device="cuda")
        group.all_to_all_single(arrived, x.flatten().clone(), [], []).wait()
        assert arrived.view(size, length).equal(x[rank].expand(size, length))
        got = torch.empty(length, device="cuda")
        sent = group.send([x[rank].clone()], (rank + 1) % size) if size > 1 else None
        if sent is not None:
            group.recv([got], (rank - 1) % size).wait()
            sent.wait()
            assert got.equal(x[(rank - 1) % size])
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        late = torch.ones(length, device="cuda")
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # what is sent is not computed yet when the collective is started
        late += rank
        group.allreduce([late]).wait()
        doubled = late * 2
    side.synchronize()
    assert doubled.eq(2 * sum(range(1, size + 1))).all()
    column = torch.zeros(4, length, device="cuda")[:, 0]
    column += 1
    group.allreduce([column]).wait()
    assert column.eq(size).all()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [5, 300_000])
def test_collectives_on_cuda_tensors(size: int, length: int) -> None:
    run_groups(size, _everything, length)


def test_callbacks_on_cuda_tensors_see_the_result() -> None:
    def program(group: StrettoGroup) -> list[float]:
        def twice(done: torch.futures.Future[Any]) -> Any:
            x = done.value()[0] * 2
            group.allreduce([x]).wait()
            return x

        futures = [group.allreduce([torch.full((1000,), float(n), device="cuda")]).get_future().then(twice) for n in range(6)]
        return [float(future.wait()[0]) for future in futures]

    assert run_groups(2, program) == [[8.0 * n for n in range(6)]] * 2


def test_compressed_sums_on_cuda_tensors() -> None:
    def program(group: StrettoGroup) -> float:
        x = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).cuda()
        mine = x[group.rank()].clone()
        group.allreduce([mine]).wait()
        return float((mine - x.sum(0)).norm() / x.sum(0).norm())

    assert largest(run_groups(2, program, options=GroupOptions(compress=Int8()))) < 0.03


def train_on_gpu() -> dict[str, float]:
    """FSDP2 and DDP, of workers that share the GPU, against one process."""
    from torch_backend import training

    dist: Any = torch.distributed
    import stretto  # noqa: F401

    dist.init_process_group("stretto")
    torch.cuda.set_device(0)
    want = [parameter.cuda() for parameter in training.alone()]

    def data(step: int) -> torch.Tensor:
        return training.part(training.batch(step)).cuda()

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded: Any = fully_shard(training.mlp().cuda(), mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    training.train(sharded, training.adamw(sharded), data)
    replicated = torch.nn.parallel.DistributedDataParallel(training.mlp().cuda(), device_ids=[0], bucket_cap_mb=0.005)
    training.train(replicated, training.adamw(replicated), data)
    result = {
        "FSDP2": training.difference(sharded.parameters(), want),
        "DDP": training.difference(replicated.parameters(), want),
    }
    dist.barrier()
    dist.destroy_process_group()
    return result


def split_on_gpu() -> float:
    dist: Any = torch.distributed
    import stretto  # noqa: F401

    torch.cuda.set_device(0)
    dist.init_process_group("stretto", device_id=torch.device("cuda", 0))
    split = dist.split_group(split_ranks=[[0, 2], [1]])
    x = torch.full((3,), float(dist.get_rank()), device="cuda")
    dist.broadcast(x, src=dist.get_process_group_ranks(split)[-1], group=split)
    dist.barrier()
    dist.destroy_process_group()
    return float(x.sum())


@pytest.mark.processes
def test_torchs_own_split_group_works_where_a_gpu_is_bound() -> None:
    from stretto.launching.spawn import launch

    assert launch(split_on_gpu, 3) == [6, 3, 6]


def test_combined_futures_of_cuda_tensors_are_seen_when_they_are_there() -> None:
    def program(group: StrettoGroup) -> list[float]:
        tensors = [torch.full((300_000,), float(n), device="cuda") for n in range(6)]
        futures = [group.allreduce([tensor]).get_future() for tensor in tensors]
        together = torch.futures.collect_all(futures)
        total = together.then(lambda done: sum(one.value()[0].sum() for one in done.value()))
        sums = [float(one.value()[0].sum()) for one in together.wait()]
        return [*sums, float(total.wait())]

    want = [2.0 * n * 300_000 for n in range(6)]
    assert run_groups(2, program) == [[*want, sum(want)]] * 2


@pytest.mark.processes
def test_fsdp2_and_ddp_of_workers_that_share_a_gpu() -> None:
    from stretto.launching.spawn import launch

    for result in launch(train_on_gpu, 2):
        assert all(worst < 1e-3 for worst in result.values()), result
