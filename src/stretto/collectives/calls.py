"""What each public collective does with the caller's tensors: checks them, picks a plan, and says what its result is.

Every function starts its collective among the members of a group and returns its handle. All of them check what they are given
before anything is sent. `root`, `to` and `source` are ranks in the group. Stacked tensors have one row for each member.
(`all_reduce`, which may first find out which algorithm is fastest, is `Job.start_all_reduce`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from stretto.collectives.admission import check_tensor
from stretto.collectives.group import Group
from stretto.collectives.messages import Name
from stretto.collectives.plan import Kind, chunk_start
from stretto.collectives.reduction import check_op
from stretto.collectives.started import Started
from stretto.errors import ConfigurationError

LARGE_BYTES: Final = 1 << 20  # from here on the plans that send least, or in segments, are better than those with least latency
MAX_OBJECT_BYTES: Final = 64 << 20  # every member holds as many times the longest as there are members


def tell_autograd(tensor: Tensor) -> None:
    """Results are written to memory that autograd may have saved for a backward, which must then raise and not use them."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= LARGE_BYTES


# -- one tensor for all -------------------------------------------------------------------------------------------------


def start_broadcast(group: Group, tensor: Tensor, root: int, name: Name | None = None, label: str = "") -> Started[Tensor]:
    """Replace everybody's tensor by the root's."""
    group.check_rank(root, "root")
    check_tensor("broadcast", tensor)
    group.endpoint.check_usable()
    tell_autograd(tensor)
    algorithm = "chain" if _is_large(tensor) else "binomial"
    return group.begin(Kind.BROADCAST, tensor, algorithm, lambda: tensor, root=root, name=name, label=label)


def start_reduce(group: Group, tensor: Tensor, root: int, op: str) -> Started[Tensor]:
    """Replace the root's tensor by the mean (sum, ...) of all. Those of other members stay as they are: partial sums, which the
    plan leaves there, go into a copy."""
    group.check_rank(root, "root")
    check_tensor("reduce", tensor, writes=group.rank == root)
    check_op(op, tensor.dtype)
    group.endpoint.check_usable()
    work = tensor
    if group.rank == root:
        tell_autograd(tensor)
    else:
        work = tensor.detach().clone()
    return group.begin(Kind.REDUCE, work, "binomial", lambda: tensor, op=op, root=root)


def start_barrier(group: Group, label: str = "") -> Started[None]:
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    return group.begin(Kind.BARRIER, nothing, "dissemination", lambda: None, label=label)


# -- a part for each ----------------------------------------------------------------------------------------------------


def start_all_gather(group: Group, tensor: Tensor) -> Started[Tensor]:
    """All members' tensors, stacked."""
    check_tensor("all_gather", tensor, writes=False)
    gathered = _rows_like(tensor, group.size, on_host=False)
    gathered[group.rank].copy_(tensor.detach())
    return group.begin(Kind.ALL_GATHER, gathered, "ring" if _is_large(gathered) else "direct", lambda: gathered)


def start_gather(group: Group, tensor: Tensor, root: int) -> Started[Tensor | None]:
    """All members' tensors, stacked, at the root."""
    group.check_rank(root, "root")
    check_tensor("gather", tensor, writes=False)
    is_root = group.rank == root
    rows = _rows_like(tensor, group.size, on_host=not is_root)
    rows[group.rank].copy_(tensor.detach())
    return group.begin(Kind.GATHER, rows, "direct", lambda: rows if is_root else None, root=root)


def start_scatter(group: Group, tensor: Tensor, parts: Tensor | Sequence[Tensor] | None, root: int) -> Started[Tensor]:
    """Replace everybody's tensor by its row of what the root has stacked."""
    group.check_rank(root, "root")
    check_tensor("scatter", tensor)
    if (parts is not None) != (group.rank == root):
        raise ConfigurationError(
            f"scatter(root={root}) on rank {group.rank} with{'' if parts is not None else 'out'} parts: the root gives a part to "
            f"every member, and nobody else does.\nWrite scatter(tensor, parts if group.rank == {root} else None, root={root})."
        )
    if parts is None:
        rows = _rows_like(tensor, group.size, on_host=True)
    else:
        rows = _stacked("scatter", group, parts)
        if rows.shape[1:] != tensor.shape or rows.dtype != tensor.dtype:
            raise ConfigurationError(
                f"scatter of parts {_shaped(rows[0])} into a tensor {_shaped(tensor)}: each part replaces a member's tensor, and "
                f"must be like it. Give a tensor of that shape and dtype on every member."
            )
    group.endpoint.check_usable()
    tell_autograd(tensor)

    def mine() -> Tensor:
        with torch.no_grad():
            tensor.detach().copy_(rows[group.rank])
        return tensor

    return group.begin(Kind.SCATTER, rows, "direct", mine, root=root, writes=False)


def start_reduce_scatter(group: Group, tensor: Tensor, op: str) -> Started[Tensor]:
    """This member's part of the mean (sum, ...) over all. The tensor itself stays as it is: the plan works on a copy."""
    check_tensor("reduce_scatter", tensor, writes=False)
    check_op(op, tensor.dtype)
    work = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone()
    first, last = (chunk_start(place, work.numel(), group.size) for place in (group.rank, group.rank + 1))
    algorithm = "ring" if _is_large(work) else "direct"
    return group.begin(Kind.REDUCE_SCATTER, work, algorithm, lambda: work[first:last].clone(), op=op)


def start_all_to_all(group: Group, tensors: Tensor | Sequence[Tensor]) -> Started[Any]:
    """Row i goes to member i; what comes back has in row i what member i has sent. A list of tensors gives a list."""
    rows = _stacked("all_to_all", group, tensors)
    if rows is tensors:
        rows = rows.detach().clone(memory_format=torch.contiguous_format)
    as_list = not isinstance(tensors, Tensor)
    return group.begin(Kind.ALL_TO_ALL, rows, "transpose", lambda: list(rows.unbind()) if as_list else rows)


def _rows_like(tensor: Tensor, size: int, *, on_host: bool) -> Tensor:
    """Room for everybody's tensor. Where one row is used it is taken in host memory, which is not there until it is written."""
    device = torch.device("cpu") if on_host else tensor.device
    return torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=device)


def _stacked(call: str, group: Group, tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """One row for each member. A list of equal tensors is stacked; a tensor is taken as it is."""
    if not isinstance(tensors, Tensor):
        parts = list(tensors)
        for part in parts:
            check_tensor(call, part, writes=False)
        if len({(part.shape, part.dtype, part.device) for part in parts}) > 1:
            shapes = ", ".join(dict.fromkeys(map(_shaped, parts)))
            raise ConfigurationError(
                f"{call} of tensors that differ ({shapes}): every member gets an equal part. Pad them to one shape, or use send "
                f"and recv."
            )
        if len(parts) == group.size:
            return torch.stack([part.detach() for part in parts])
        raise _wrong_number(call, group, f"{len(parts)} tensors")
    check_tensor(call, tensors, writes=False)
    if tensors.dim() == 0 or tensors.shape[0] != group.size:
        raise _wrong_number(call, group, f"a tensor {_shaped(tensors)}")
    return tensors


def _wrong_number(call: str, group: Group, given: str) -> ConfigurationError:
    return ConfigurationError(
        f"{call} of {given} among {group.size} members: there is one part for each, and the first dimension counts them.\n"
        f"Give a list of {group.size} tensors, or a tensor of shape ({group.size}, ...)."
    )


def _shaped(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# -- from one to one ----------------------------------------------------------------------------------------------------


def start_send(group: Group, tensor: Tensor, to: int) -> Started[Tensor]:
    """Give another member the values of a tensor."""
    group.check_rank(to, "to")
    check_tensor("send", tensor, writes=False)
    _check_other(group, to, f"send(to={to})")
    return group.begin_pair(group.rank, to, tensor)


def start_recv(group: Group, tensor: Tensor, source: int) -> Started[Tensor]:
    """Replace a tensor by what another member sends."""
    group.check_rank(source, "source")
    check_tensor("recv", tensor)
    _check_other(group, source, f"recv(source={source})")
    group.endpoint.check_usable()
    tell_autograd(tensor)
    return group.begin_pair(source, group.rank, tensor)


def _check_other(group: Group, rank: int, call: str) -> None:
    if rank == group.rank:
        raise ConfigurationError(f"{call} on rank {rank}: that is this worker itself. Name another member, or copy the tensor.")


# -- objects ------------------------------------------------------------------------------------------------------------


def gather_object(group: Group, value: Any) -> list[Any]:
    """All members' values. Two collectives: their lengths come first."""
    try:
        encoded = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise ConfigurationError(
            f"gather_object of a {type(value).__name__} that cannot be encoded ({problem}). It carries what is made of None, "
            f"bool, int, float, str, bytes, list and dict. Convert it to these; for tensors there is all_gather."
        ) from problem
    lengths = start_all_gather(group, torch.tensor([len(encoded)], dtype=torch.int64, device="cpu")).wait()
    longest = int(lengths.max())
    if longest > MAX_OBJECT_BYTES:
        raise ConfigurationError(
            f"gather_object: a value of {longest} encoded bytes; the limit is {MAX_OBJECT_BYTES}. "
            f"Put large data into a tensor and use all_gather."
        )
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = start_all_gather(group, padded).wait().numpy()
    return [msgspec.msgpack.decode(rows[place, : int(lengths[place])].tobytes()) for place in range(group.size)]


def split(group: Group, color: int | str | None) -> Group | None:
    """The group of the members that have given the same color."""
    if not isinstance(color, (int, str)) and color is not None:
        raise ConfigurationError(
            f"split(color={color!r}): colors are compared between workers, and are numbers or texts. Write an int, a str, or "
            f"None for a worker that is to be in no group."
        )
    colors = gather_object(group, color)
    return None if color is None else group.sub(place for place, other in enumerate(colors) if other == color)
