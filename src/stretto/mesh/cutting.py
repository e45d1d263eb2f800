"""tensor_parallel(): cut a model over the dimensions of a mesh, in place.

    1. The layout says what it would cut, and is checked; nothing is sent before that has succeeded on this worker.
    2. All workers compare what they are about to do. Whoever refuses is heard by all.
    3. Parameters and buffers become those of the first worker along every dimension that is cut over: slices of what is cut,
       copies of what is not. So are the states of random generators.
    4. Modules get their new behaviour (`cut_modules.py`).

Parameters stay the same objects, of which only the memory is exchanged: an optimizer that has them already keeps them, and tied
ones stay tied.

The first forward compares what all workers along such a dimension were given: with different batches, everything that follows
would be wrong without a word.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stretto.collectives import calls
from stretto.errors import ConfigurationError, RankMismatch
from stretto.mesh.cut_modules import CutModule, become
from stretto.mesh.equal_inputs import first_that_differs
from stretto.mesh.layout import Layout, check_splits
from stretto.mesh.mesh import Axis, Mesh
from stretto.mesh.placements import Planned, Split
from stretto.mesh.tensor_cut import Cuts, TensorCut

M = TypeVar("M", bound=nn.Module)
ATTRIBUTE = "_stretto_cut"  # of a model, and of its parameters


class CutOver:
    """What a model that is cut remembers of it."""

    def __init__(self, mesh: Mesh, layout: Layout, axes: list[Axis]) -> None:
        self.mesh = mesh
        self.layout = layout
        self.axes = axes

    def __deepcopy__(self, memo: dict[int, object]) -> CutOver:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def tensor_parallel(model: M, mesh: Mesh, layout: Layout) -> M:
    """Cut `model` over the mesh as the layout says, in place; returns it. All workers of the mesh call it, before `distribute`.

    Every worker makes the whole model; the weights of the first along each dimension that is cut over count. Afterwards each
    holds its slices. The model takes and gives what it did, and computes the same up to rounding. All workers along a dimension
    that is cut over must be given the same batches (`stretto.Sampler(..., job=mesh.job("data"))`).

    `state_dict()` gives whole tensors: all workers call it. `load_state_dict` takes whole ones.
    """
    problem, planned, splits = None, [], {}
    try:
        _check_arguments(model, mesh, layout)
        planned = layout.plan(model, mesh.dimensions)
        splits = check_splits(model, [split for each in planned for split in each.splits], mesh.dimensions)
    except ConfigurationError as refused:
        problem = refused
    _admit(mesh, problem, model, layout, splits)
    axes = [Axis(mesh, name) for name in mesh.dimensions if name in layout.over]
    by_name = {axis.name: axis for axis in axes}
    cuts = {parameter: tuple(_cut(split, by_name) for split in found) for parameter, found in splits.items()}
    for axis in axes:
        _share_along(axis, model, cuts)
    for parameter in splits:
        parameter.__dict__[ATTRIBUTE] = cuts[parameter]
    _become_cut(planned, splits, cuts, by_name)
    _keep_off_fast_paths(model)
    cut_over = CutOver(mesh, layout, axes)
    object.__setattr__(model, ATTRIBUTE, cut_over)
    object.__setattr__(model, "_stretto_job", mesh.job(*layout.batch_over(mesh.dimensions)))  # among whom `distribute` trains it
    _compare_first_input(model, axes)
    return model


def cut_over(model: nn.Module) -> CutOver | None:
    """How a model was cut, if it was."""
    found = model.__dict__.get(ATTRIBUTE)
    return found if isinstance(found, CutOver) else None


def cuts_of(parameter: Tensor) -> Cuts:
    """How a parameter was cut: empty if it is whole."""
    found: Cuts = parameter.__dict__.get(ATTRIBUTE, ())
    return found


def _check_arguments(model: object, mesh: object, layout: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"tensor_parallel({type(model).__name__}, ...): the first argument is the nn.Module to cut.")
    if not isinstance(mesh, Mesh):
        raise ConfigurationError(
            f"tensor_parallel(model, {mesh!r}, ...): the second argument is a stretto.Mesh(data=..., model=...)."
        )
    if not isinstance(layout, Layout):
        raise ConfigurationError(
            f"tensor_parallel(model, mesh, {layout!r}): the third argument is a stretto.Layout(...), or that of a recipe such as "
            f"stretto.recipes.megatron()."
        )
    for name, module in model.named_modules():
        if isinstance(module, CutModule) or ATTRIBUTE in module.__dict__:
            raise ConfigurationError(
                f"tensor_parallel: {name or 'the model'} has been cut before, and a slice is not cut again.\n"
                f"Write one layout with all that is to be cut."
            )
        if "_stretto_engine" in module.__dict__:
            raise ConfigurationError(
                "tensor_parallel of a model that is distributed already: its buckets hold whole parameters.\n"
                "Cut it first, model = tensor_parallel(model, mesh, layout), and then distribute(model, optimizer)."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta or isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"tensor_parallel: parameter {name} has no memory yet. Give it some before it is cut "
                "(model.to_empty(device=...), or "
                f"one forward where it is lazy)."
            )


def _admit(
    mesh: Mesh, problem: ConfigurationError | None, model: nn.Module, layout: Layout, splits: dict[Tensor, tuple[Split, ...]]
) -> None:
    """All workers of the mesh go on together, or none does."""
    names: dict[Tensor, str] = {}
    if isinstance(model, nn.Module):
        names = {parameter: name for name, parameter in model.named_parameters()}
    mine = [None if problem is None else str(problem), _description(layout, names, splits) if problem is None else []]
    everybody = mesh.whole.gather_object(mine)
    if problem is not None:
        raise problem
    for rank, (theirs, description) in enumerate(everybody):
        if theirs is not None:
            raise ConfigurationError(
                f"tensor_parallel() was refused on rank {rank}, so nobody can begin. There it said:\n{theirs}"
            )
        for ours, other in zip(mine[1] or [], description, strict=False):
            if ours != other:
                raise RankMismatch(
                    f"tensor_parallel(): ranks {mesh.whole.rank} and {rank} differ. The first difference:\n"
                    f"  rank {mesh.whole.rank}: {ours}\n  rank {rank}: {other}\nBuild the same model and layout on every rank."
                )
        if len(description) != len(mine[1] or []):
            raise RankMismatch(f"tensor_parallel(): rank {rank} has another number of parameters than rank {mesh.whole.rank}.")


def _description(layout: Layout, names: dict[Tensor, str], splits: dict[Tensor, tuple[Split, ...]]) -> list[str]:
    lines = [repr(layout)]
    for parameter, name in names.items():
        cuts = [f"dimension {split.dim} over {split.over}" for split in splits.get(parameter, ())]
        lines.append(f"{name}: {tuple(parameter.shape)} {parameter.dtype}, {', '.join(cuts) or 'whole'}")
    return lines


def _cut(split: Split, axes: dict[str, Axis]) -> TensorCut:
    return TensorCut(axes[split.over], split.dim, split.parts)


def _share_along(axis: Axis, model: nn.Module, cuts: dict[Tensor, Cuts]) -> None:
    """Everybody along a dimension gets its part of what the first has."""
    if axis.size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            cut = next((each for each in cuts.get(tensor, ()) if each.axis is axis), None)
            if cut is not None:
                tensor.grad = None
                tensor.data = cut.start_scatter(tensor.data).wait()
            elif tensor.numel():
                calls.start_broadcast(axis.group, tensor.data, 0).wait()
    _share_generators(axis, next((tensor.device for tensor in model.parameters()), torch.device("cpu")))


def _share_generators(axis: Axis, device: torch.device) -> None:
    """What is outside of cut blocks drops the same everywhere."""
    state = torch.get_rng_state()
    torch.set_rng_state(calls.start_broadcast(axis.group, state, 0).wait())
    if device.type == "cuda":
        on_gpu = torch.cuda.get_rng_state(device)
        torch.cuda.set_rng_state(calls.start_broadcast(axis.group, on_gpu, 0).wait(), device)


def _become_cut(
    planned: list[Planned], splits: dict[Tensor, tuple[Split, ...]], cuts: dict[Tensor, Cuts], axes: dict[str, Axis]
) -> None:
    for each in planned:
        each.finish(axes)
    for each in planned:
        for split in each.splits:
            become(split.module, CutModule)
            parameter = getattr(split.module, split.name)
            split.module.__dict__.setdefault("_cuts", {})[split.name] = cuts[parameter]


def _keep_off_fast_paths(model: nn.Module) -> None:
    """Torch's transformer layers have kernels for inference that read the weights themselves, and would take slices for all."""
    for module in model.modules():
        if not any(isinstance(inner, CutModule) for inner in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


# -- the first input ----------------------------------------------------------------------------------------------------


def _compare_first_input(model: nn.Module, axes: list[Axis]) -> None:
    def compare(module: nn.Module, arguments: Any, options: Any) -> None:
        handle.remove()
        for axis in axes:
            if (other := first_that_differs(axis.group, (arguments, options))) is not None:
                raise RankMismatch(
                    f"{type(module).__name__} is cut over {axis.name!r}, and ranks {axis.group.ranks[0]} and {other} have called "
                    f"it with different inputs in its first forward: each computes a part of the same result.\n"
                    f"Give all workers along {axis.name!r} the same batches: stretto.Sampler(dataset, "
                    f"job=mesh.job(\"data\")), where the batch is over 'data'; and seed alike what draws them."
                )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)
