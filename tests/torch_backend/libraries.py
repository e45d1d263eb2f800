"""Libraries of torch's on our backend, in real workers: each function compares with one process and returns how far it is off.

Every function is called in all workers of a job, in which torch.distributed is initialised.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from torch_backend import pipelines, sharding
from torch_backend.training import (
    Case,
    Difference,
    adamw,
    batch,
    difference,
    dist,
    mlp,
    part,
    part_of_batch,
    sgd,
    train,
    trained_alone,
)


def run(names: list[str], folder: str, is_long: bool) -> dict[str, Difference]:
    """Join the job, run these, and leave it."""
    import stretto  # noqa: F401  # is all that it takes

    dist.init_process_group("stretto")
    from stretto.torch_backend.process_group import StrettoGroup

    assert dist.get_backend() == "stretto" and isinstance(dist.group.WORLD, StrettoGroup)
    results = {name: FUNCTIONS[name](Case(Path(folder), is_long)) for name in names}
    dist.barrier()
    dist.destroy_process_group()
    return results


# -- data parallel ------------------------------------------------------------------------------------------------------


def ddp(case: Case) -> Difference:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.005)  # several buckets
    train(model, adamw(model), part_of_batch, case.steps)
    return difference(model.parameters(), trained_alone(case.steps).parameters())


def ddp_power_sgd(case: Case) -> Difference:
    """With a rank that loses nothing here but digits (so not with AdamW, for which the last of a small gradient count), so that
    the result must be the exact one; gloo hangs with more than one bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=24, start_powerSGD_iter=2, min_compression_rate=0.1)
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.005)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, sgd(model), part_of_batch, case.steps)
    worst = difference(model.parameters(), trained_alone(case.steps, sgd).parameters())
    assert state.iter == case.steps and len(state.p_memory_dict) > 1, "it has compressed, and in several buckets"
    return worst


def ddp_half_precision(case: Case) -> Difference:
    """fp16 on the wire rounds gradients to 11 bits, and SGD hands that on: the model's way is off by less than a thousandth of
    its length. Scaled to the others' bound."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.005)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, sgd(model), part_of_batch, case.steps)
    reference, start = trained_alone(case.steps, sgd), mlp()
    ours, theirs, at_first = (nn.utils.parameters_to_vector(one.parameters()).detach() for one in (model, reference, start))
    off = float((ours - theirs).norm() / (theirs - at_first).norm())
    assert off > 1e-6, "it was in half precision"
    return off / 1e-3 * 1e-5


def ddp_sparse(case: Case) -> Difference:
    from torch.nn.parallel import DistributedDataParallel

    def embedding() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2))

    words = torch.randint(0, 20, (24, 3), generator=torch.Generator().manual_seed(0))
    reference, model = embedding(), DistributedDataParallel(embedding())
    train(reference, sgd(reference), lambda step: words, case.steps)
    train(model, sgd(model), lambda step: part(words), case.steps)
    return difference(model.parameters(), reference.parameters())


def zero_redundancy(case: Case) -> Difference:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    train(model, optimizer, part_of_batch, case.steps)
    optimizer.consolidate_state_dict(to=0)
    return difference(model.parameters(), trained_alone(case.steps).parameters())


def uneven_join(case: Case) -> Difference:
    """Worker 0 has one batch less than the others. Join divides by the number of workers at first, so one process does too."""
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = DistributedDataParallel(mlp()), mlp()
    with Join([model]):
        train(model, sgd(model), part_of_batch, case.steps - (rank == 0))
    optimizer = sgd(reference)
    for step in range(case.steps):
        optimizer.zero_grad()
        parts = batch(step).chunk(size)[1 if step == case.steps - 1 else 0 :]
        total = sum(reference(mine).square().mean() for mine in parts) / size
        total.backward()
        optimizer.step()
    return difference(model.parameters(), reference.parameters())


# -- by itself ----------------------------------------------------------------------------------------------------------


def objects_and_groups(case: Case) -> Difference:
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": other} for other in range(size)]
    one: list[Any] = [f"word {rank}"]
    dist.broadcast_object_list(one, src=size - 1)
    assert one == [f"word {size - 1}"]
    dist.scatter_object_list(one, [f"for {other}" for other in range(size)] if rank == 0 else None)
    assert one == [f"for {rank}"]
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        x = torch.ones(3)
        dist.all_reduce(x, group=pair)
        assert x.eq(2).all()
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(5)
    operations = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, torch.full((5,), float(rank)), right)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.eq(left).all()
    return 0.0


def split_groups(case: Case) -> Difference:
    """torch's functions look groups up in torch's own table: those that our method has made, and one that torch's function has
    made, which asks for a device that the group is bound to. Here the CPU stands for an accelerator."""
    rank, size, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu", 0)
    chosen = [0, size - 1]
    made = [dist.group.WORLD.split_group(chosen, timeout=timedelta(seconds=seconds), group_desc="two") for seconds in (40, 1800)]
    dist.group.WORLD._get_backend(cpu).eager_connect_single_device(cpu)  # as init_process_group(device_id=...) does
    with (
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: cpu),
    ):
        made.append(dist.split_group(split_ranks=[chosen]))
    if rank in chosen:
        assert [group.group.arrive_s for group in made] == [40, None, None]  # torch says 1800 where nothing was said
        assert [group.group_desc[-5:] for group in made] == ["two", "two", "split"]
        for group in made:
            _use_by_torchs_functions(group, chosen)
    else:
        assert made == [None] * 3
    return 0.0


def _use_by_torchs_functions(group: Any, ranks: list[int]) -> None:
    import torch.distributed._functional_collectives as functional_collectives
    from torch.distributed.device_mesh import DeviceMesh

    assert dist.get_process_group_ranks(group) == ranks and dist.get_backend(group) == "stretto"
    assert ranks[dist.get_rank(group)] == dist.get_rank()
    x = torch.full((1,), float(dist.get_rank()))
    dist.broadcast(x, src=ranks[1], group=group)
    assert x.item() == ranks[1]
    assert functional_collectives.all_reduce(torch.ones(1), "sum", group).item() == 2
    assert DeviceMesh.from_group(group, "cpu").mesh.tolist() == ranks
    dist.monitored_barrier(group, timeout=timedelta(seconds=30))
    dist.destroy_process_group(group)


def functional(case: Case) -> Difference:
    import torch.distributed._functional_collectives as functional_collectives

    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    summed = functional_collectives.all_reduce(torch.full((4,), float(rank)), "sum", group)
    gathered = functional_collectives.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    scattered = functional_collectives.reduce_scatter_tensor(torch.ones(2 * size), "avg", 0, group)
    moved = functional_collectives.all_to_all_single(torch.full((size,), float(rank)), [1] * size, [1] * size, group)
    assert summed.eq(sum(range(size))).all() and scattered.eq(1).all()
    assert gathered.view(size, 2).eq(torch.arange(size).unsqueeze(1)).all() and moved.eq(torch.arange(size)).all()
    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = [torch.ones(3), torch.ones(5)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(tensor.eq(size).all() for tensor in tensors)
    return 0.0


FUNCTIONS: dict[str, Callable[[Case], Difference]] = {
    function.__name__: function
    for function in (
        ddp, ddp_power_sgd, ddp_half_precision, ddp_sparse, zero_redundancy, uneven_join, sharding.fsdp2, sharding.hybrid,
        sharding.tensor_parallel, sharding.checkpoints, pipelines.one_stage_each, pipelines.several_stages_each,
        objects_and_groups, split_groups, functional,
    )
}  # fmt: skip
