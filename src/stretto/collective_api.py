"""The public collectives: moving tensors between all workers, or between those of a group.

Each takes `group=`, which is all workers of the job if it is left out; `root`, `to` and `source` are ranks in that group, as
`group.rank` counts them. Every member must call it, in the same order as its other collectives of that group. (What `send` and
`recv` do is in order between each two workers only.) Tensors may be on a CPU or a CUDA device, contiguous or not.

`start_NAME` begins what NAME does and returns at once, with a handle: `handle.wait()` gives the result. Until then the tensors
belong to the collective. Any number may be under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from torch import Tensor

from stretto.api import Algorithm, current_job
from stretto.collectives import calls
from stretto.collectives.admission import Number, as_before, as_number, as_tensor
from stretto.collectives.group import Among, Group
from stretto.collectives.reduction import Op
from stretto.collectives.started import Started
from stretto.errors import ConfigurationError


def _group(given: object) -> Group:
    job = current_job()
    if isinstance(given, str) and given == "world":
        return job.world
    if given is None:
        raise ConfigurationError(
            f"a collective with group=None on rank {job.rank}: it is in no such group (split gives None to a worker without a "
            f"color), and only members call a group's collectives.\n"
            f"Write if group is not None: ... For all workers of the job leave group out."
        )
    if not isinstance(given, Group):
        raise ConfigurationError(
            f"group={given!r}: this is no group, which all members make together, once. "
            f"Write group = stretto.group(ranks), keep it, and pass group=group."
        )
    if given.endpoint is not job.endpoint:
        raise ConfigurationError(
            f"group={given!r}: it was made in another job than the one this worker is in now. Make it again after stretto.init()."
        )
    return given


# -- groups -------------------------------------------------------------------------------------------------------------


def world() -> Group:
    """The group of all workers of the job."""
    return current_job().world


def group(ranks: Iterable[int]) -> Group:
    """A group of the workers with these ranks, in this order. All of them must call it, and nobody else.

    What happens to workers outside of it changes nothing for its collectives; the loss of a member fails them with `PeerLost`.
    """
    return world().sub(ranks)


def split(color: int | str | None, group: Among = "world") -> Group | None:
    """One group for each color, of the workers that have given it, in the order of their ranks. All workers must call it.

    A worker that gives None is in no group, and gets None.
    """
    return calls.split(_group(group), color)


# -- one tensor for all -------------------------------------------------------------------------------------------------


@overload
def all_reduce(tensor: Tensor, op: Op = "mean", algorithm: Algorithm = "auto", group: Among = "world") -> Tensor: ...
@overload
def all_reduce(tensor: Number, op: Op = "mean", algorithm: Algorithm = "auto", group: Among = "world") -> Number: ...
def all_reduce(
    tensor: Tensor | Number, op: Op = "mean", algorithm: Algorithm = "auto", group: Among = "world"
) -> Tensor | Number:
    """Replace `tensor`, in place, by its mean (sum, min, max, product) over all workers; returns it. All end with the same bits.

    Every worker must call it with a tensor of the same length and dtype. CPU or CUDA, contiguous or not. If autograd needs the
    old values for a backward, that raises: give a copy, `tensor.detach().clone()`. A number gives a number.
    """
    among = _group(group)
    if isinstance(tensor, Tensor):
        return current_job().start_all_reduce(tensor, op, algorithm, among).wait()
    number = as_number("all_reduce", tensor)
    return as_before(current_job().start_all_reduce(as_tensor(number, op), op, algorithm, among).wait(), number, op)


def start_all_reduce(tensor: Tensor, op: Op = "mean", algorithm: Algorithm = "auto", group: Among = "world") -> Started[Tensor]:
    """Begin an `all_reduce` of a tensor. The first `algorithm="auto"` of a group waits for all: it measures their links."""
    return current_job().start_all_reduce(tensor, op, algorithm, _group(group))


@overload
def broadcast(tensor: Tensor, root: int = 0, group: Among = "world") -> Tensor: ...
@overload
def broadcast(tensor: Number, root: int = 0, group: Among = "world") -> Number: ...
def broadcast(tensor: Tensor | Number, root: int = 0, group: Among = "world") -> Tensor | Number:
    """Replace `tensor`, in place, by the one of rank `root`; returns it. Given numbers, it returns the one of rank `root`."""
    among = _group(group)
    if isinstance(tensor, Tensor):
        return calls.start_broadcast(among, tensor, root).wait()
    among.check_rank(root, "root")
    numbers: list[Number] = calls.gather_object(among, as_number("broadcast", tensor))  # of any kind: one may be 0.5, others 0
    return numbers[root]


def start_broadcast(tensor: Tensor, root: int = 0, group: Among = "world") -> Started[Tensor]:
    """Begin a `broadcast` of a tensor."""
    return calls.start_broadcast(_group(group), tensor, root)


def reduce(tensor: Tensor, root: int = 0, op: Op = "mean", group: Among = "world") -> Tensor:
    """Replace the `tensor` of rank `root`, in place, by the mean (sum, min, max, product) of all; returns it.

    The tensors of other workers stay as they are.
    """
    return calls.start_reduce(_group(group), tensor, root, op).wait()


def start_reduce(tensor: Tensor, root: int = 0, op: Op = "mean", group: Among = "world") -> Started[Tensor]:
    """Begin a `reduce`."""
    return calls.start_reduce(_group(group), tensor, root, op)


def barrier(group: Among = "world") -> None:
    """Return when every worker has called it."""
    calls.start_barrier(_group(group)).wait()


def start_barrier(group: Among = "world") -> Started[None]:
    """Begin a `barrier`: it is done when every worker has begun it."""
    return calls.start_barrier(_group(group))


# -- a part for each ----------------------------------------------------------------------------------------------------


def all_gather(tensor: Tensor, group: Among = "world") -> Tensor:
    """Every worker's tensor, stacked by rank: shape (size, *tensor.shape). All must have the same shape."""
    return calls.start_all_gather(_group(group), tensor).wait()


def start_all_gather(tensor: Tensor, group: Among = "world") -> Started[Tensor]:
    """Begin an `all_gather`."""
    return calls.start_all_gather(_group(group), tensor)


def gather(tensor: Tensor, root: int = 0, group: Among = "world") -> Tensor | None:
    """At rank `root` every worker's tensor, stacked by rank: shape (size, *tensor.shape). Other workers get None."""
    return calls.start_gather(_group(group), tensor, root).wait()


def start_gather(tensor: Tensor, root: int = 0, group: Among = "world") -> Started[Tensor | None]:
    """Begin a `gather`."""
    return calls.start_gather(_group(group), tensor, root)


def scatter(tensor: Tensor, parts: Tensor | Sequence[Tensor] | None = None, root: int = 0, group: Among = "world") -> Tensor:
    """Replace every worker's `tensor`, in place, by its part of what rank `root` gives; returns it.

    `parts` is given by the root alone: a tensor for each worker, as a list or stacked, each of the shape and dtype of `tensor`.
    """
    return calls.start_scatter(_group(group), tensor, parts, root).wait()


def start_scatter(
    tensor: Tensor, parts: Tensor | Sequence[Tensor] | None = None, root: int = 0, group: Among = "world"
) -> Started[Tensor]:
    """Begin a `scatter`."""
    return calls.start_scatter(_group(group), tensor, parts, root)


def reduce_scatter(tensor: Tensor, op: Op = "mean", group: Among = "world") -> Tensor:
    """This worker's part of the mean (sum, min, max, product) over all workers: a new, flat tensor. `tensor` stays as it is.

    The elements are cut in their order into as many parts as there are workers. Where they do not divide, the first parts have
    one element more: 7 elements among 3 workers are 3, 2 and 2.
    """
    return calls.start_reduce_scatter(_group(group), tensor, op).wait()


def start_reduce_scatter(tensor: Tensor, op: Op = "mean", group: Among = "world") -> Started[Tensor]:
    """Begin a `reduce_scatter`."""
    return calls.start_reduce_scatter(_group(group), tensor, op)


@overload
def all_to_all(tensors: Tensor, group: Among = "world") -> Tensor: ...
@overload
def all_to_all(tensors: Sequence[Tensor], group: Among = "world") -> list[Tensor]: ...
def all_to_all(tensors: Tensor | Sequence[Tensor], group: Among = "world") -> Tensor | list[Tensor]:
    """Give every worker a part, and get one from each: part i goes to rank i, and part i of the result is from rank i.

    The parts are a list of tensors of one shape, or a tensor with a row for each worker; the result is of the same kind.
    """
    result: Tensor | list[Tensor] = calls.start_all_to_all(_group(group), tensors).wait()
    return result


@overload
def start_all_to_all(tensors: Tensor, group: Among = "world") -> Started[Tensor]: ...
@overload
def start_all_to_all(tensors: Sequence[Tensor], group: Among = "world") -> Started[list[Tensor]]: ...
def start_all_to_all(tensors: Tensor | Sequence[Tensor], group: Among = "world") -> Started[Any]:
    """Begin an `all_to_all`."""
    return calls.start_all_to_all(_group(group), tensors)


def gather_object(value: Any, group: Among = "world") -> list[Any]:
    """Every worker's value by rank, on every worker: anything made of None, bool, int, float, str, bytes, list and dict."""
    return calls.gather_object(_group(group), value)


# -- from one to one ----------------------------------------------------------------------------------------------------


def send(tensor: Tensor, to: int, group: Among = "world") -> None:
    """Give rank `to` the values of `tensor`; returns when that worker has called `recv`. Only these two take part.

    What one worker sends another is received in that order, and in no order with anything else. Two that send to each other
    before they receive would wait for each other (they are told so): there one of them, or both, uses `start_send`.
    """
    calls.start_send(_group(group), tensor, to).wait()


def start_send(tensor: Tensor, to: int, group: Among = "world") -> Started[Tensor]:
    """Begin a `send`."""
    return calls.start_send(_group(group), tensor, to)


def recv(tensor: Tensor, source: int, group: Among = "world") -> Tensor:
    """Replace `tensor`, in place, by what rank `source` sends next to this worker; returns it. Both have one length and dtype."""
    return calls.start_recv(_group(group), tensor, source).wait()


def start_recv(tensor: Tensor, source: int, group: Among = "world") -> Started[Tensor]:
    """Begin a `recv`."""
    return calls.start_recv(_group(group), tensor, source)
