"""What each of torch's collectives is as collectives of ours, in one group.

Every function checks what it is given, says what goes where in one flat vector (`memory.py`), starts a collective of the
catalogue on it and returns the operation under way. Nothing here waits. A reduce-scatter is one, (P-1)/P of the tensor sent by
each member; an all-to-all is P-1 transfers each way between two members, whose lengths need not be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.collectives.reduction import check_op
from stretto.collectives.request import InProgress
from stretto.errors import ConfigurationError
from stretto.torch_backend.memory import Memory, Placed, as_on_wire
from stretto.torch_backend.naming import next_name, part_of
from stretto.torch_backend.operation import Operation

LARGE_BYTES: Final = 1 << 20  # from here on round a ring, where everybody sends to one neighbour only
SMALL_BYTES: Final = 32 << 10  # up to here in as few steps as possible
MEDIUM_BYTES: Final = 256 << 10


class Transfers:
    """The collectives of one process group. `algorithm`: of its all-reduces, by their length in bytes."""

    def __init__(self, group: Group, memory: Memory, algorithm: Callable[[int], str]) -> None:
        self.group = group
        self.memory = memory
        self.algorithm = algorithm

    # -- one tensor for all -------------------------------------------------------------------------------------------

    def all_reduce(self, tensors: Sequence[Tensor], op: str, arrive_s: float | None) -> Operation:
        """All-reduce several tensors of one dtype as one vector."""
        tensors, op = as_numbers(tensors, op)
        placed, length = _one_after_the_other(tensors)
        num_bytes = length * tensors[0].element_size()
        whole = tensors[0] if len(tensors) == 1 else None
        return self._run(
            Kind.ALL_REDUCE, self.algorithm(num_bytes), length, placed, placed, whole, op=op, arrive_s=arrive_s, result=tensors
        )

    def broadcast(self, tensor: Tensor, root: int, arrive_s: float | None) -> Operation:
        self.group.check_rank(root, "root")
        mine = as_on_wire(tensor)
        placed, is_root = [(0, mine)], root == self.group.rank
        algorithm = "chain" if mine.nbytes >= LARGE_BYTES else "binomial"
        inputs, outputs = (placed, ()) if is_root else ((), placed)
        return self._run(
            Kind.BROADCAST, algorithm, mine.numel(), inputs, outputs, mine, root=root, arrive_s=arrive_s, result=[tensor]
        )

    def reduce(self, tensor: Tensor, root: int, op: str, arrive_s: float | None) -> Operation:
        """Into the root's tensor. The others' stay as they are: partial sums go into a copy."""
        self.group.check_rank(root, "root")
        [mine], op = as_numbers([tensor], op)
        placed, is_root = [(0, mine)], root == self.group.rank
        outputs, whole = (placed, mine) if is_root else ((), None)
        return self._run(
            Kind.REDUCE, "binomial", mine.numel(), placed, outputs, whole, op=op, root=root, arrive_s=arrive_s, result=[tensor]
        )

    def barrier(self, arrive_s: float | None, label: str = "") -> Operation:
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._run(
            Kind.BARRIER, "dissemination", 0, [(0, nothing)], (), nothing, arrive_s=arrive_s, result=[], label=label
        )  # fmt: skip

    # -- a part for each ----------------------------------------------------------------------------------------------

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, arrive_s: float | None) -> Operation:
        """`outputs`: one tensor for all parts, or one for each."""
        mine, into = as_on_wire(tensor), [as_on_wire(output) for output in outputs]
        length = self.check_parts("all_gather", into, mine)
        n = mine.numel()
        whole = into[0] if len(into) == 1 else None
        algorithm = "ring" if length * mine.element_size() >= LARGE_BYTES else "direct"
        placed, _ = _one_after_the_other(into)
        return self._run(
            Kind.ALL_GATHER, algorithm, length, [(self.group.rank * n, mine)], placed, whole, arrive_s=arrive_s, result=outputs
        )

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str, arrive_s: float | None) -> Operation:
        """`inputs`: one tensor with a part for everybody, or one for each. They stay as they are: the sums form in a copy."""
        parts, op = as_numbers([output, *inputs], op)
        into, parts = parts[0], parts[1:]
        length = self.check_parts("reduce_scatter", parts, into)
        algorithm = "ring" if length * into.element_size() >= LARGE_BYTES else "direct"
        placed, _ = _one_after_the_other(parts)
        outputs = [(self.group.rank * into.numel(), into)]
        return self._run(
            Kind.REDUCE_SCATTER, algorithm, length, placed, outputs, None, op=op, arrive_s=arrive_s, result=[output]
        )  # fmt: skip

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int, arrive_s: float | None) -> Operation:
        """`outputs`: at the root one for each member."""
        self.group.check_rank(root, "root")
        mine, into = as_on_wire(tensor), [as_on_wire(output) for output in outputs]
        if root == self.group.rank:
            self.check_parts("gather", into, mine)
        n = mine.numel()
        placed, _ = _one_after_the_other(into)
        return self._run(
            Kind.GATHER, "direct", n * self.group.size, [(self.group.rank * n, mine)], placed, None, root=root,
            arrive_s=arrive_s, result=outputs,
        )  # fmt: skip

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, arrive_s: float | None) -> Operation:
        """`inputs`: at the root one for each member."""
        self.group.check_rank(root, "root")
        into, parts = as_on_wire(output), [as_on_wire(part) for part in inputs]
        if root == self.group.rank:
            self.check_parts("scatter", parts, into)
        n = into.numel()
        placed, _ = _one_after_the_other(parts)
        return self._run(
            Kind.SCATTER, "direct", n * self.group.size, placed, [(self.group.rank * n, into)], None, root=root,
            arrive_s=arrive_s, result=[output], like=into,
        )  # fmt: skip

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], result: Sequence[Tensor], arrive_s: float | None
    ) -> Operation:
        """Part i of `inputs` goes to member i, whose part for this one comes into part i of `outputs`. Lengths may differ."""
        group, me, size = self.group, self.group.rank, self.group.size
        if len(inputs) != size or len(outputs) != size:
            raise ConfigurationError(
                f"all_to_all of {len(inputs)} parts into {len(outputs)} among {size} members: there is one part for each member, "
                f"and one from each. Give {size} of both."
            )
        if inputs[me].numel() != outputs[me].numel():
            raise ConfigurationError(
                f"all_to_all on rank {me}: its part for itself has {inputs[me].numel()} elements, and {outputs[me].numel()} "
                f"are to come from itself. Make these two split sizes equal."
            )
        name = next_name(group) if size > 1 else None
        sent, received = [as_on_wire(part) for part in inputs], [as_on_wire(part) for part in outputs]
        under_way: list[InProgress] = []
        left: list[Callable[[], None]] = []
        for shift in range(1, size):
            assert name is not None
            to, source = (me + shift) % size, (me - shift) % size
            into = self.memory.lend(received[source].numel(), received[source], (), [(0, received[source])], received[source])
            left += [] if into.finish is None else [into.finish]
            under_way.append(
                group.start_pair(source, me, into.flat, part_of(name, source, me), into.ready, arrive_s, " of all_to_all")
            )
            mine = self.memory.lend(sent[to].numel(), sent[to], [(0, sent[to])], (), sent[to])
            left += [] if mine.finish is None else [mine.finish]  # which gives borrowed memory back
            under_way.append(group.start_pair(me, to, mine.flat, part_of(name, me, to), mine.ready, arrive_s, " of all_to_all"))
        with torch.no_grad():
            received[me].detach().copy_(sent[me].detach().reshape(received[me].shape))
        return Operation(under_way, result, _all_of(left), name)

    # -- how all of them run ------------------------------------------------------------------------------------------

    def _run(
        self,
        kind: Kind,
        algorithm: str,
        length: int,
        inputs: Placed,
        outputs: Placed,
        whole: Tensor | None,
        *,
        result: Sequence[Tensor],
        op: str = "sum",
        root: int = 0,
        arrive_s: float | None = None,
        like: Tensor | None = None,
        label: str = "",
    ) -> Operation:
        like = like if like is not None else (*inputs, *outputs)[0][1]
        if self.group.size == 1:
            self.group.endpoint.check_usable()
            self.memory.fill_at_once(length, like, inputs, outputs)
            return Operation((), result)
        name = next_name(self.group)
        lent = self.memory.lend(length, like, inputs, outputs, whole)
        pending = self.group.start(
            kind, lent.flat, algorithm, op=op, root=root, name=name, ready=lent.ready, label=label, arrive_s=arrive_s
        )
        return Operation([pending], result, lent.finish, name)

    def check_parts(self, call: str, parts: Sequence[Tensor], one: Tensor) -> int:
        """Check that there is a part of equal length for each member. Returns the length of all parts together."""
        size, total = self.group.size, sum(part.numel() for part in parts)
        equal = len(parts) == 1 or (len(parts) == size and len({part.numel() for part in parts}) == 1)
        if total != size * one.numel() or not equal:
            raise ConfigurationError(
                f"{call} among {size} members with parts of {[part.numel() for part in parts]} elements and {one.numel()} "
                f"of this member's own: all parts are equally long. Give {size} times {one.numel()} elements, or use all_to_all."
            )
        if any(part.dtype != one.dtype for part in parts):
            raise ConfigurationError(
                f"{call} with parts of {parts[0].dtype} and {one.dtype} of this member's own: convert them to one dtype."
            )
        return total


def algorithm_by_length(num_bytes: int) -> str:
    """Where nobody has measured: few steps for small tensors, least volume to one neighbour for large ones."""
    if num_bytes <= SMALL_BYTES:
        return "butterfly"
    return "halving_doubling" if num_bytes < MEDIUM_BYTES else "ring"


def _one_after_the_other(tensors: Sequence[Tensor]) -> tuple[list[tuple[int, Tensor]], int]:
    placed, start = [], 0
    for tensor in tensors:
        placed.append((start, tensor))
        start += tensor.numel()
    return placed, start


def as_numbers(tensors: Sequence[Tensor], op: str) -> tuple[list[Tensor], str]:
    """What can be combined. The sum of bools is whether any is true, their product whether all are, as in torch's own."""
    dtype = tensors[0].dtype
    if any(tensor.dtype != dtype for tensor in tensors):
        raise ConfigurationError(
            f"tensors of {[str(tensor.dtype) for tensor in tensors]} combined as one: convert them to one dtype."
        )
    if dtype is torch.bool:
        op = {"sum": "max", "product": "min"}.get(op, op)
    check_op(op, dtype)
    return list(tensors), op


def _all_of(actions: Sequence[Callable[[], None]]) -> Callable[[], None] | None:
    if not actions:
        return None

    def both() -> None:
        for action in actions:
            action()

    return both
