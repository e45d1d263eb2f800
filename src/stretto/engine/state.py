"""Copying a worker's whole training state to the others: parameters, buffers and the optimizers' state.

What is not a tensor travels as msgpack, tensors by broadcast; the receiving side builds the same `state_dict` and loads it.

Loading is not enough: `Optimizer.load_state_dict` casts floating-point state to the dtype of its parameter, so float32 moments of
a bfloat16 parameter would be float32 on the worker that sends them and bfloat16 on all others. `load_exactly` undoes those casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.engine.watch import Watch
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.launching.peers import ranks_text

TENSOR = "__tensor__"
TOGETHER_BYTES = 4 << 20  # small tensors travel together, up to so much


def copy_model(job: Job, model: nn.Module, root: int = 0) -> None:
    """Replace every worker's parameters and buffers, in place, by those of rank `root`."""
    copy_tensors(job, (*model.parameters(), *model.buffers()), root)


def copy_tensors(job: Job, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Replace the tensors, in place, by those of rank `root`; those of one dtype and device go together while they are small."""
    copy_by(lambda tensor: job.broadcast(tensor, root), tensors)


def copy_by(broadcast: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> None:
    """The same by a broadcast of the caller's: one that carries a name, say."""
    for group in _groups(map(distinct_elements, tensors)):
        if len(group) == 1:
            broadcast(group[0].data)
        else:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            _scatter(broadcast(flat), group)


def copy_buffers(job: Job, watch: Watch, broadcast: Callable[[Tensor], Tensor], *, saved: bool) -> None:
    """Replace the model's buffers by those of rank 0 where they differ; `saved`: a backward to come may read what is there.

    In place, so that references to a buffer stay good, and openly: autograd raises if it has saved the buffer after all. If it
    probably has, the model gets a new tensor. Statistics of a BatchNorm in training are written in place behind autograd's back:
    it saves them for a backward that does not read them, and two forwards before one backward (a GAN's) are nothing wrong.
    """
    statistics = watch.statistics()
    for group in _groups(watch.buffers()):
        distinct = [distinct_elements(buffer) for buffer in group]
        flat = torch.cat([part.reshape(-1) for part in distinct])
        broadcast(flat)
        if job.rank != 0:
            parts = torch.split(flat, [part.numel() for part in distinct])
            for buffer, shape, part in zip(group, distinct, parts, strict=True):
                write_buffer(watch, buffer, part.view(shape.shape), hidden=id(buffer) in statistics, saved=saved)


def write_buffer(watch: Watch, buffer: Tensor, value: Tensor, *, hidden: bool, saved: bool) -> None:
    if hidden:
        buffer.data.copy_(value)
    elif torch.equal(distinct_elements(buffer), value):
        return
    elif saved:
        watch.replace_buffer(buffer, torch.empty_like(buffer).copy_(value))
    else:
        with torch.no_grad():
            distinct_elements(buffer).copy_(value)


def distinct_elements(tensor: Tensor) -> Tensor:
    """The tensor, detached, without the repetitions of `expand`: several of its elements would be one place in memory, and cannot
    be written. It broadcasts back to the tensor's shape."""
    if tensor.layout is not torch.strided:
        return tensor.detach()
    repeats = [size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if not any(repeats):
        return tensor.detach()
    return tensor.detach()[tuple(slice(0, 1) if repeated else slice(None) for repeated in repeats)]


def _groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            key = tensor.dtype, tensor.device
            group = filling.setdefault(key, [])
            if group and sum(other.nbytes for other in group) + tensor.nbytes > TOGETHER_BYTES:
                yield filling.pop(key)
                group = filling.setdefault(key, [])
            group.append(tensor)
    yield from filling.values()


def _scatter(flat: Tensor, targets: Sequence[Tensor]) -> None:
    start = 0
    for target in targets:
        target.data.copy_(flat[start : start + target.numel()].view(target.shape))
        start += target.numel()


def share_optimizer(job: Job, optimizer: Optimizer) -> None:
    """Let every worker start with rank 0's optimizer state and options, if any has a state or other options than rank 0."""
    options = [{key: repr(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    everybody = job.gather_object([bool(optimizer.state), options])
    if any(has_state or theirs != everybody[0][1] for has_state, theirs in everybody):
        copy_optimizer(job, optimizer)


def copy_optimizer(job: Job, optimizer: Optimizer, root: int = 0) -> None:
    """Replace every worker's optimizer state and options by those of rank `root`."""
    mine = job.rank == root
    tensors: list[Tensor] = []
    skeleton, problem = _described(optimizer, tensors) if mine else (None, "")
    skeleton, problem = job.gather_object([skeleton, problem])[root]
    if problem:
        raise ConfigurationError(
            f"the state of rank {root}'s {type(optimizer).__name__} cannot be sent to the others: {problem}.\n"
            f"Keep tensors, numbers, strings, lists and dicts in it, or load the same state on every rank after distribute()."
        )
    if not mine:
        tensors = [torch.empty(shape, dtype=getattr(torch, name), device="cpu") for name, shape in kinds(skeleton)]
    for tensor in tensors:
        if tensor.numel():
            job.broadcast(tensor, root)
    if not mine:
        state = put_together(skeleton, iter(tensors))
        state["param_groups"] = _as_before(optimizer.state_dict()["param_groups"], state["param_groups"])
        load_exactly(optimizer, state)


class Exact(dict[Any, Any]):
    """The `state` of a `state_dict` whose dtypes are to stay, for whoever takes it in instead of the optimizer."""


def load_exactly(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state_dict)`, and then every tensor has the dtype that it has in `state_dict`."""
    optimizer.load_state_dict({**state_dict, "state": Exact(state_dict["state"])})
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name in state_dict["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _without_casts(optimizer.state[parameter], state_dict["state"][name])


def _without_casts(loaded: Any, saved: Any) -> Any:
    """What was loaded; tensors that got another dtype on the way are replaced by the saved ones, on the device they are on."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.detach().to(loaded.device).clone()
    if isinstance(loaded, dict) and isinstance(saved, dict):
        loaded.update({key: _without_casts(value, saved[key]) for key, value in loaded.items() if key in saved})
    elif isinstance(loaded, list) and isinstance(saved, list) and len(loaded) == len(saved):
        loaded[:] = [_without_casts(*pair) for pair in zip(loaded, saved, strict=True)]
    return loaded


def copy_scaler(job: Job, scaler: torch.amp.GradScaler | None, root: int) -> None:
    """Give every worker's GradScaler the scale of rank `root`'s, and its count towards the next growth. On all workers."""
    everybody = job.gather_object(None if scaler is None else scaler.state_dict())
    if scaler is not None and everybody[root]:
        scaler.load_state_dict(everybody[root])
    unknown = [rank for rank, state in enumerate(everybody) if state is None]
    if everybody[root] and unknown:  # the state of a scaler that is not enabled is empty
        raise ConfigurationError(
            f"the GradScaler of {ranks_text(unknown)} has not been seen yet, because no step was taken with it there, so it "
            f"cannot be given the scale of rank {root}.\nGive it to distribute(model, optimizer, scaler=scaler) on all workers."
        )


def _described(optimizer: Optimizer, tensors: list[Tensor]) -> tuple[Any, str]:
    """The state without its tensors; or why it cannot be written down, which the others must hear rather than wait for ever."""
    plain = {key: value for key, value in optimizer.state_dict().items() if key in ("state", "param_groups")}
    skeleton = take_apart(plain, tensors)  # what compressions remember is each worker's own
    try:
        msgspec.msgpack.encode(skeleton)
    except (TypeError, ValueError, OverflowError) as unwritable:
        return None, str(unwritable)
    return skeleton, ""


def unsendable(optimizer: Optimizer) -> str:
    """What of its state cannot be sent to another worker, in words; empty if all of it can."""
    return _described(optimizer, [])[1]


def take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with every tensor replaced by its dtype and shape, in order of appearance in `tensors`. Keys may be ints."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return [[key, take_apart(item, tensors)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return {"list": [take_apart(item, tensors) for item in value]}
    return value


def put_together(value: Any, tensors: Any) -> Any:
    """The reverse of `take_apart`."""
    if isinstance(value, list):
        return {key: put_together(item, tensors) for key, item in value}
    if isinstance(value, dict) and TENSOR in value:
        return next(tensors)
    if isinstance(value, dict):
        return [put_together(item, tensors) for item in value["list"]]
    return value


def kinds(value: Any) -> list[tuple[str, list[int]]]:
    """Dtype and shape of every tensor that `take_apart` took out, in order."""
    if isinstance(value, list):
        return [kind for _, item in value for kind in kinds(item)]
    if isinstance(value, dict) and TENSOR in value:
        return [tuple(value[TENSOR])]
    if isinstance(value, dict):
        return [kind for item in value["list"] for kind in kinds(item)]
    return []


def _as_before(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """msgpack knows no tuples: give options back the type they have here."""
    return [
        {key: tuple(value) if isinstance(own.get(key), tuple) else value for key, value in group.items()}
        for own, group in zip(ours, theirs, strict=True)
    ]
