"""FSDP2, tensor parallelism and distributed checkpoints on our backend, in real workers, against one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from largest import largest
from torch_backend.training import (
    Case,
    Difference,
    adamw,
    batch,
    difference,
    dist,
    mlp,
    part_of_batch,
    train,
    trained_alone,
)


def sharded() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2(case: Case) -> Difference:
    """The parameters; and the norm of all gradients, and what they are clipped to."""
    model, reference = sharded(), trained_alone(case.steps)
    train(model, adamw(model), part_of_batch, case.steps)
    worst = difference(model.parameters(), reference.parameters())
    norms = [nn.utils.clip_grad_norm_(one.parameters(), 1e-3) for one in (model, reference)]
    assert norms[1] > 2e-3, "it has clipped"
    gradients: list[Any] = [[parameter.grad for parameter in one.parameters()] for one in (model, reference)]
    return largest((worst, difference(norms[:1], norms[1:]), difference(*gradients)))


def hybrid(case: Case) -> Difference:
    """FSDP2 over a mesh of two dimensions: replicas of shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicas", "shards"))
    model: Any = fully_shard(mlp(), mesh=mesh)
    train(model, adamw(model), part_of_batch, case.steps)
    return difference(model.parameters(), trained_alone(case.steps).parameters())


def cut_over(mesh: Any) -> nn.Module:
    """The model, its layers cut over the members of a mesh."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(mlp(), mesh, plan)


def tensor_parallel(case: Case) -> Difference:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))
    model = cut_over(mesh["model"])
    train(model, adamw(model), batch, case.steps)
    values = torch.arange(48.0).view(6, 8)
    cut = distribute_tensor(values, mesh, [Shard(0), Shard(1)])
    for placements in ([Shard(1), Replicate()], [Replicate(), Shard(0)], [Replicate(), Replicate()]):
        assert cut.redistribute(placements=placements).full_tensor().equal(values)
    return difference(model.parameters(), trained_alone(case.steps).parameters())


# -- checkpoints --------------------------------------------------------------------------------------------------------


def checkpoints(case: Case) -> Difference:
    """Saved from shards, loaded into shards of another model, and by rank 0 alone as a plain one."""
    import torch.distributed.checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    dcp: Any = torch.distributed.checkpoint
    model, want = sharded(), list(trained_alone(case.steps).parameters())
    train(model, adamw(model), part_of_batch, case.steps)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=str(case.folder / "dcp"))
    other = sharded()
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=str(case.folder / "dcp"))
    set_model_state_dict(other, state["model"])
    worst = difference(other.parameters(), want)
    if dist.get_rank() == 0:
        plain = {"model": mlp(1).state_dict()}
        dcp.load(plain, checkpoint_id=str(case.folder / "dcp"), no_dist=True)
        worst = largest((worst, difference(plain["model"].values(), want)))
    return worst


def train_from_checkpoint(folder: str, first: int, steps: int) -> Difference:
    """Load the model and its optimizer, unless these are the first steps; train on, save, and compare with one process that has
    trained all the time. Worlds of different sizes may take turns."""
    import torch.distributed.checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import stretto  # noqa: F401

    dcp: Any = torch.distributed.checkpoint
    dist.init_process_group("stretto")
    model = sharded()
    optimizer = adamw(model)
    if first:
        states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=f"{folder}/{first}")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(model, optimizer, part_of_batch, steps, first)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{folder}/{first + steps}")
    worst = difference(model.parameters(), trained_alone(first + steps).parameters())
    dist.barrier()
    dist.destroy_process_group()
    return worst
