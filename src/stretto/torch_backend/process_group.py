"""A group of the job as torch knows it: `torch.distributed.ProcessGroup`.

torch calls these methods, from Python and from C++, under the names of its own backends (2.11 says `_allgather_base` where 2.13
says `all_gather_single`). Each returns a `Work`. Operations of one group are to be started in the same order on all its members,
as with every backend; sends and receives are in no order with them; different groups have nothing to do with each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from stretto.collectives import calls
from stretto.collectives.group import Group
from stretto.compress.codec import Codec
from stretto.errors import ConfigurationError, StrettoError
from stretto.job import Job
from stretto.plan.auto import chosen_for
from stretto.torch_backend import sparse_sums, torchs_table
from stretto.torch_backend.backend_view import BackendView
from stretto.torch_backend.completion import CompletionThread
from stretto.torch_backend.compressing import CompressedSums
from stretto.torch_backend.deadline import own_deadline, refuse_no_time
from stretto.torch_backend.exchanges import Exchanges
from stretto.torch_backend.memory import Memory
from stretto.torch_backend.monitored import monitored_barrier
from stretto.torch_backend.operation import Operation
from stretto.torch_backend.options import GroupOptions
from stretto.torch_backend.pairs import Pairs, matching_of
from stretto.torch_backend.reduce_op import is_premultiplied, our_op, premultiplied
from stretto.torch_backend.transfers import Transfers, algorithm_by_length, as_numbers
from stretto.torch_backend.work import OperationWork, ReceiveWork

NAME = "stretto"


_ProcessGroup: Any = dist.ProcessGroup  # its stubs have the methods as overloads, which a subclass cannot be written by


class StrettoGroup(_ProcessGroup):  # type: ignore[misc]
    """One process group. `group` has its members and channels of its own; `store` is torch's, for whoever asks for it."""

    def __init__(
        self,
        job: Job,
        group: Group,
        options: GroupOptions | None = None,
        arrive_s: float | None = None,
        store: Store | None = None,
        on_shutdown: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(group.rank, group.size)
        self.job = job
        self.group = group
        self.options = options or GroupOptions()
        group.arrive_s = arrive_s  # None: the job's
        self._store = store
        self._on_shutdown = on_shutdown
        self._name, self._description = "", "undefined"
        self._completion = CompletionThread()
        memory = Memory()
        if group.size > 1:  # members with different options would start different collectives
            calls.start_barrier(group, f" to make a process group with {self.options!r}").wait()
        algorithm = self._algorithms()
        self._transfers = Transfers(group, memory, algorithm)
        self._pairs = Pairs(group, memory, matching_of(job))
        self._exchanges = Exchanges(job, group)
        codec = self.options.compress
        self._compressed = (
            CompressedSums(self._exchanges, codec, self.options.algorithm, algorithm) if isinstance(codec, Codec) else None
        )
        self._num_operations = self._num_monitored = 0
        self._num_splits: Counter[tuple[int, ...]] = Counter()  # by the ranks of those that were made
        self._is_shut_down = self._is_checked = False
        job.threads.add(self._completion)

    def _algorithms(self) -> Callable[[int], str]:
        algorithm = self.options.algorithm
        if algorithm is None:
            return algorithm_by_length
        if algorithm == "auto" and self.group.size > 1:
            return chosen_for(self.group, "a process group").algorithm  # now, where all members are: no later one has to wait
        return lambda num_bytes: algorithm

    # -- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        opts = _options_from(AllreduceOptions(), opts, timeout)
        return self._all_reduce(_listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._all_reduce(list(tensors), opts or AllreduceCoalescedOptions())

    def _all_reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        patience = self._patience(opts)
        scaled = is_premultiplied(opts.reduceOp)
        op = "sum" if scaled else our_op(opts.reduceOp)
        if scaled:
            as_numbers(tensors, op)  # refuses what has no sum before anything is changed
            for tensor, values in zip(tensors, [premultiplied(tensor, opts.reduceOp) for tensor in tensors], strict=True):
                tensor.detach().copy_(values)
        if tensors[0].layout is not torch.strided:
            return self._works([sparse_sums.all_reduce(self._exchanges, tensor, op) for tensor in tensors])
        if self._compressed is not None and self._compressed.takes(tensors, op):
            return self._work(self._compressed.all_reduce(tensors, op))
        return self._work(self._transfers.all_reduce(tensors, op, patience))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(opts, int):
            root, opts = opts, BroadcastOptions()
            opts.rootRank = root
        opts = _options_from(BroadcastOptions(), opts, timeout)
        [tensor] = _listed(tensors)
        return self._work(self._transfers.broadcast(tensor, opts.rootRank, self._patience(opts)))

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(opts, int):
            root, opts = opts, ReduceOptions()
            opts.rootRank = root
            opts.reduceOp = op or dist.ReduceOp.SUM
        opts = _options_from(ReduceOptions(), opts, timeout)
        [tensor] = _listed(tensors)
        values = premultiplied(tensor, opts.reduceOp) if is_premultiplied(opts.reduceOp) else tensor
        if values is not tensor and opts.rootRank == self.rank():
            tensor.detach().copy_(values)
            values = tensor
        name = "sum" if is_premultiplied(opts.reduceOp) else our_op(opts.reduceOp)
        return self._work(self._transfers.reduce(values, opts.rootRank, name, self._patience(opts)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        opts = _options_from(AllgatherOptions(), opts, timeout)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        patience = self._patience(opts)
        return self._works([self._transfers.all_gather(into, mine, patience) for into, mine in zip(outputs, inputs, strict=True)])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """`output_lists` has a list for each member, with a tensor for each input."""
        return self.allgather([list(outputs) for outputs in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        patience = self._patience(opts or AllgatherOptions())
        return self._work(self._transfers.all_gather([output], input, patience))

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        patience = self._patience(opts or AllgatherOptions())
        return self._works(
            [self._transfers.all_gather([into], mine, patience) for into, mine in zip(outputs, inputs, strict=True)]
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:  # fmt: skip
        opts = _options_from(ReduceScatterOptions(), opts, timeout)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._works([self._reduce_scatter(into, parts, opts) for into, parts in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._work(self._reduce_scatter(output, [input], opts or ReduceScatterOptions()))

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or ReduceScatterOptions()
        return self._works([self._reduce_scatter(into, [parts], opts) for into, parts in zip(outputs, inputs, strict=True)])

    def _reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], opts: Any) -> Operation:
        patience = self._patience(opts)
        if is_premultiplied(opts.reduceOp):
            inputs, op = [premultiplied(part, opts.reduceOp) for part in inputs], "sum"
        else:
            op = our_op(opts.reduceOp)
        if self._compressed is not None and self._compressed.takes(inputs, op):
            self._transfers.check_parts("reduce_scatter", inputs, output)
            return self._compressed.reduce_scatter(output, inputs, op)
        return self._transfers.reduce_scatter(output, inputs, op, patience)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:  # fmt: skip
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = _options_with_root(GatherOptions(), opts, timeout)
        [tensor], into = inputs, outputs[0] if outputs else []
        return self._work(self._transfers.gather(into, tensor, opts.rootRank, self._patience(opts)))

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:  # fmt: skip
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = _options_with_root(ScatterOptions(), opts, timeout)
        [into], parts = outputs, inputs[0] if inputs else []
        return self._work(self._transfers.scatter(into, parts, opts.rootRank, self._patience(opts)))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        patience = self._patience(opts or AllToAllOptions())
        return self._work(self._transfers.all_to_all(outputs, inputs, outputs, patience))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Rows of the input go to the members, as many as `input_sizes` says; empty: equally many to each."""
        patience = self._patience(opts or AllToAllOptions())
        into, parts = _rows(output, output_sizes, self.size()), _rows(input, input_sizes, self.size())
        return self._work(self._transfers.all_to_all(into, parts, [output], patience))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        return self._work(self._transfers.barrier(self._patience(_options_from(BarrierOptions(), opts, timeout))))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who did not come in time. (Every operation of this backend does.)"""
        self._check_usable()
        seconds = self._arrive_s if timeout is None else timeout.total_seconds()
        number, self._num_monitored = self._num_monitored, self._num_monitored + 1
        monitored_barrier(self._pairs, self.group, number, seconds, wait_all_ranks=wait_all_ranks)

    # -- as torch 2.11 calls them -------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- from one to one ----------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803  # torch's name
        self._check_usable()
        [tensor] = tensors
        return self._work(self._pairs.send(tensor, dstRank, tag))

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        return self._receive(tensors, [srcRank], tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        return self._receive(tensors, [source for source in range(self.size()) if source != self.rank()], tag)

    def _receive(self, tensors: Sequence[Tensor], sources: list[int], tag: int) -> dist.Work:
        self._check_usable()
        [tensor] = tensors
        operation, received = self._pairs.receive(tensor, sources, tag, self._arrive_s)
        self._num_operations += 1
        return ReceiveWork(operation, self._completion, received)

    # -- groups -------------------------------------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: GroupOptions | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> StrettoGroup | None:
        """The group of the members with these ranks in this group; None on others, which need not call it.

        `timeout`: left out, this group's. `group_name` is for `dist.split_group`, which enters the group in torch's table."""
        if self.rank() not in new_ranks:
            return None
        arrive_s = own_deadline(timeout) or self.group.arrive_s
        sub = self.group.sub(new_ranks)
        made = StrettoGroup(self.job, sub, opts or self.options, arrive_s, self._store)
        made.setGroupDesc(group_desc or f"{self._description}:split")
        if group_name is not None:
            made.setGroupName(group_name)
            return made
        self._num_splits[sub.ranks] += 1
        made.setGroupName(f"{self._name}:split:{'-'.join(map(str, sub.ranks))}:{self._num_splits[sub.ranks]}")
        if torchs_table.has(self):
            torchs_table.enter(made, self, sub.ranks)
        return made

    def shutdown(self) -> None:
        """Nothing more is started in this group; the job goes on, unless it was joined for this group alone."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._completion.stop()
            self._exchanges.stop()
            if self._on_shutdown is not None:
                self._on_shutdown()

    def abort(self) -> None:
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        refuse_no_time(timeout)
        self.group.arrive_s = timeout.total_seconds()

    # -- what torch asks ----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, device: torch.device) -> BackendView:
        return BackendView(self)

    def get_group_store(self) -> Store:
        if self._store is None:
            raise ConfigurationError("this group has no store: it was made without torch.distributed.init_process_group.")
        return self._store

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Members count alike from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        """How many operations were started here; the same on all members between two collectives."""
        return self._num_operations

    # -- works --------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """torch takes a group that is written in Python for all devices, whatever backends it was asked to have beside it."""
        if self._is_shut_down:
            raise StrettoError("this process group was shut down: nothing more is started in it. Make another: dist.new_group().")
        if not self._is_checked:
            asked = str(dist.distributed_c10d._world.pg_backend_config.get(self, NAME))
            others = [each for each in asked.split(",") if each.rpartition(":")[2] != NAME]
            if others:
                raise ConfigurationError(
                    f"a process group with backend={asked!r}: torch uses {NAME!r} for all devices, not {', '.join(others)}.\n"
                    f'Write init_process_group("{NAME}"), and make another group for the other backend: '
                    f'dist.new_group(backend="{others[0].rpartition(":")[2]}").'
                )
            self._is_checked = True

    @property
    def _arrive_s(self) -> float:
        return self.group.arrive_s or self.job.timeouts.arrive_s

    def _patience(self, opts: Any) -> float | None:
        """An operation's own deadline, if it has one; torch says "none" by a negative one."""
        self._check_usable()
        own_s: float = opts.timeout.total_seconds()
        return own_s if own_s > 0 and opts.timeout != dist.distributed_c10d.default_pg_timeout else None

    def _work(self, operation: Operation) -> dist.Work:
        self._num_operations += 1
        return OperationWork(operation, self._completion)

    def _works(self, operations: Sequence[Operation]) -> dist.Work:
        """Several operations as one."""
        if len(operations) == 1:
            return self._work(operations[0])
        under_way = [one for operation in operations for one in operation.under_way]
        result = [tensor for operation in operations for tensor in operation.result]

        def finish() -> None:
            for operation in operations:
                operation.settle()
                if operation.error is not None:
                    raise operation.error

        return self._work(Operation(under_way, result, finish, operations[0].name if operations else None))


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _options_from(made: Any, opts: Any, timeout: timedelta | None) -> Any:
    """Options from what the overloads take in their place: an operation, or nothing."""
    if isinstance(opts, type(made)):
        made = opts
    elif opts is not None:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _options_with_root(made: Any, opts: Any, timeout: timedelta | None) -> Any:
    if isinstance(opts, int):
        made.rootRank = opts
        opts = made
    return _options_from(made, opts, timeout)


def _rows(tensor: Tensor, sizes: Sequence[int], parts: int) -> list[Tensor]:
    if sizes:
        if sum(sizes) != (tensor.shape[0] if tensor.dim() else 0) or len(sizes) != parts:
            raise ConfigurationError(
                f"split sizes {list(sizes)} of a tensor of shape {list(tensor.shape)} among {parts} members: one for each, and "
                f"they add up to the first dimension. Correct the sizes."
            )
        return list(torch.split(tensor, list(sizes)))
    if tensor.dim() == 0 or tensor.shape[0] % parts:
        raise ConfigurationError(
            f"a tensor of shape {list(tensor.shape)} in equal parts for {parts} members: its first dimension does not divide. "
            f"Give split sizes, or pad it."
        )
    return list(tensor.chunk(parts)) if tensor.shape[0] else [tensor] * parts
