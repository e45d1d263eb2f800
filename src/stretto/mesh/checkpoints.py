"""What of a model that is cut goes into a checkpoint: the whole model and the whole optimizer state, as one process has them.

Slices are put together among the workers that hold parts of one replica; those of the first replica do so, and the first of them
has the result. What each worker has of its own (random generators, what a compression remembers) is kept for each, and taken up
where the mesh and the layout are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.collectives import calls
from stretto.errors import CheckpointError
from stretto.job import Job
from stretto.mesh.cut_modules import CutModule, whole_shape
from stretto.mesh.cutting import cut_over, cuts_of
from stretto.mesh.tensor_cut import Cuts, own_slice


def job_of_all(model: nn.Module, job: Job) -> Job:
    """The workers that train this model in parts and in replicas: those that save and load it together."""
    over = cut_over(model)
    return job if over is None else over.mesh.job(*over.layout.batch_over(over.mesh.dimensions), *over.layout.over)


def description(model: nn.Module) -> dict[str, Any] | None:
    """The mesh and the layout that a model is cut by; None if it is whole."""
    over = cut_over(model)
    return None if over is None else {"dimensions": dict(over.mesh.dimensions), "layout": repr(over.layout)}


def is_first_part(model: nn.Module) -> bool:
    """Whether this worker is the first along all dimensions that the model is cut over: one of them for each replica."""
    over = cut_over(model)
    return over is None or all(axis.place == 0 for axis in over.axes)


def same_part_of_first_replica(model: nn.Module) -> int:
    """The rank, among those that save together, of the worker that has this worker's part in the first replica: what all
    replicas have alike it has in the checkpoint."""
    over = cut_over(model)
    if over is None:
        return 0
    batch = over.layout.batch_over(over.mesh.dimensions)
    return over.mesh.ranks((*batch, *over.layout.over)).index(over.mesh.ranks(batch)[0])


@contextmanager
def described(model: nn.Module) -> Iterator[None]:
    """Inside, `state_dict` sends nothing, and what is cut is there without values."""
    cut = [module for module in model.modules() if isinstance(module, CutModule)]
    for module in cut:
        module._described = True
    try:
        yield
    finally:
        for module in cut:
            module._described = False


def described_state(model: nn.Module) -> dict[str, Any]:
    with described(model):
        return model.state_dict(keep_vars=True)  # so that nothing is gathered, of parameters that are in slices


def check_optimizer(optimizer: Optimizer) -> None:
    """Whether its state can be put together: it has to be element by element, as parameters are cut."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if cuts_of(parameter) else ():
            if isinstance(value, Tensor) and value.shape != parameter.shape and value.numel() > 1:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {name!r} of shape {tuple(value.shape)} for a slice of shape "
                    f"{tuple(parameter.shape)}: it is not element by element, so slices of it do not make a whole.\n"
                    f"Use an optimizer with one value for each element, such as AdamW, for models that are cut."
                )


def whole_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`state`, as `optimizer.state_dict()` gives it, with what belongs to slices put together, at the first part of a replica.
    All parts of it call it together."""
    found = dict(state["state"])
    for number, parameter in enumerate(_parameters(optimizer)):
        if (cuts := cuts_of(parameter)) and number in found:
            found[number] = {
                name: _put_together(value, cuts) if _is_cut(value, parameter) else value for name, value in found[number].items()
            }
    return {**state, "state": found}


def own_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The reverse: this worker's slices. Nothing is sent."""
    found = dict(state["state"])
    for number, parameter in enumerate(_parameters(optimizer)):
        if (cuts := cuts_of(parameter)) and number in found:
            shape = whole_shape(parameter, cuts)
            found[number] = {
                name: own_slice(value, cuts) if isinstance(value, Tensor) and tuple(value.shape) == shape else value
                for name, value in found[number].items()
            }
    return {**state, "state": found}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """In the order of their numbers in its state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_cut(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() > 1


def _put_together(own: Tensor, cuts: Cuts) -> Tensor:
    for cut in reversed(cuts):
        rows = calls.start_gather(cut.axis.group, own.contiguous(), 0).wait()
        own = own if rows is None else cut.whole(list(rows.unbind()))
    return own


def text_of(mesh: dict[str, Any] | None) -> str:
    """A `description` in words."""
    if mesh is None:
        return "not cut"
    sizes = ", ".join(f"{name}={size}" for name, size in mesh["dimensions"].items())
    return f"cut over Mesh({sizes}) by {mesh['layout']}"


def of_replicas(workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One worker of each replica: those that share the data."""
    return [worker for worker in workers if worker.get("first_part", True)]
