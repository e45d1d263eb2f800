"""Tensors by name on the servers: any worker changes and reads them, whenever it likes, and nobody has to answer to that.

    declare("seen", zeros)     all workers together: the servers keep it from now on, as rank 0 has it
    push("seen", ones)         this worker alone:    w <- w + 1, exactly once; with op="assign"  w <- 1
    pull("seen")               this worker alone:    all that was acknowledged to anybody, and what this worker has pushed

Each key is a model of one parameter to the servers, on a channel of its own, under the rule of `Asynchronous` without an
optimizer: what comes is applied on arrival, is on every server of its chain when it is acknowledged, and is applied once however
often it was sent. A push returns when it is acknowledged.

Departs:   each range of a tensor (1 MiB) is changed and read by itself, so who reads a larger one while others push may find one
           part of it before a push and another part after. What one push does to one element is never seen half.
           A push that was not acknowledged in time may still be applied: the error says so.
Cost:      of a push or a pull the tensor once, as float32, and one round trip; on each server that keeps it 4 bytes an element.
Reference: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, section 3.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from stretto.aggregate.parameter_server.client import Fill, Pull, Push
from stretto.aggregate.parameter_server.layout import VALUE_BYTES, ServedParameter, range_bytes_for
from stretto.aggregate.parameter_server.messages import Options, PushTaken
from stretto.aggregate.parameter_server.network import ServerNetwork, network_of, number_dedicated
from stretto.aggregate.parameter_server.range_state import ASSIGN
from stretto.aggregate.parameter_server.service import ServedModel
from stretto.aggregate.parameter_server.sync_spec import SyncSpec
from stretto.aggregate.parameter_server.training import SERVED_DTYPES
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.collectives.reduction import dtype_name
from stretto.errors import ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.sync.asynchronous import Asynchronous

PushOp = Literal["add", "assign"]
MAX_BYTES: Final = 1 << 30  # of a tensor, as float32
MAX_LETTERS: Final = 200  # of a key


class StoredTensor(ABC):
    """A declared key, as one worker sees it. For any thread."""

    def __init__(self, key: str, like: Tensor) -> None:
        self.key = key
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self._turn = threading.Lock()  # one request of this worker at a time, so that they are in order

    def push(self, values: Tensor, op: PushOp) -> None:
        flat = values.detach().to("cpu", torch.float32).reshape(-1).clone()  # it may have to be sent again
        with self._turn:
            self._push(flat, op)

    def pull(self) -> Tensor:
        with self._turn:
            return self._pull().reshape(self.shape).to(self.device, self.dtype)

    @abstractmethod
    def _push(self, flat: Tensor, op: PushOp) -> None: ...

    @abstractmethod
    def _pull(self) -> Tensor: ...


class OwnTensor(StoredTensor):
    """In a job of one worker, which has no servers."""

    def __init__(self, key: str, begin: Tensor) -> None:
        super().__init__(key, begin)
        self._values = begin.detach().to("cpu", torch.float32).reshape(-1).clone()

    def _push(self, flat: Tensor, op: PushOp) -> None:
        if op == "assign":
            self._values.copy_(flat)
        else:
            self._values.add_(flat)

    def _pull(self) -> Tensor:
        return self._values.clone()


class ServedTensor(StoredTensor):
    """On the servers. Made by all workers together."""

    def __init__(self, job: Job, network: ServerNetwork, key: str, begin: Tensor, replicas: int) -> None:
        super().__init__(key, begin)
        self._job = job
        parameters = [ServedParameter(key, begin.numel())]
        model = ServedModel(
            parameters=parameters, servers=network.servers, workers=list(range(job.world_size)), replicas=replicas,
            range_bytes=range_bytes_for(parameters, len(network.servers)), sync=SyncSpec.of(Asynchronous()), increments=True,
        )  # fmt: skip
        self._bounds = _bounds_of(model)
        self._clock = 0
        self._late: list[Future[Any]] = []  # what was not answered in time
        self._service = network.begin(model, self)
        problem = None
        if job.rank == 0:
            try:
                self._fill(begin.detach().to("cpu", torch.float32).reshape(-1))
            except StrettoError as error:
                problem = str(error)
        problem = job.gather_object(problem)[0]
        if problem is not None:
            raise StrettoError(f"the servers could not begin to keep {key!r}: {problem}")

    def _fill(self, flat: Tensor) -> None:
        memory = flat.contiguous().numpy()
        fills = [Fill(index, memory[start:stop].data) for index, (start, stop) in enumerate(self._bounds)]
        self._await([self._service.request(fill) for fill in fills], "declare", "")

    def _push(self, flat: Tensor, op: PushOp) -> None:
        options: Options = {ASSIGN: True} if op == "assign" else {}
        memory = flat.numpy()
        pushes = [
            Push(index, self._clock, memory[start:stop].data, options, 0) for index, (start, stop) in enumerate(self._bounds)
        ]
        self._settle("push")
        self._clock += 1
        said = "It may still be applied, or be in a part of the tensor only."
        answers = self._await([self._service.request(push) for push in pushes], "push", said)
        if any(isinstance(answer, PushTaken) and answer.applied is False for answer in answers):
            raise StrettoError(
                f"push({self.key!r}) on rank {self._job.rank}: the servers have discarded it, for they have lost this worker."
            )

    def _pull(self) -> Tensor:
        self._settle("pull")
        values = torch.empty(self._bounds[-1][1], dtype=torch.float32)
        memory = values.numpy()
        pulls = [Pull(index, self._clock, memory[start:stop].data) for index, (start, stop) in enumerate(self._bounds)]
        self._await([self._service.request(pull) for pull in pulls], "pull", "")
        return values

    def _settle(self, what: str) -> None:
        """An answer that is still to come could be taken for that of the next request."""
        if self._late:
            late, self._late = self._late, []
            wait(late, self._job.timeouts.arrive_s)
            self._late = [answer for answer in late if not answer.done()]
            if self._late:
                raise StrettoError(self._too_late(what, "An earlier request for it has not been answered either."))

    def _await(self, answers: Sequence[Future[Any]], what: str, said: str) -> list[Any]:
        self._late = list(answers)  # also if the program is interrupted while it waits
        wait(answers, self._job.timeouts.arrive_s)
        self._late = [answer for answer in answers if not answer.done()]
        for answer in answers:
            if answer.done() and (error := answer.exception()) is not None:
                if isinstance(error, PeerLost):  # it names the key, as the parameter that was lost
                    raise error
                raise StrettoError(f"{what}({self.key!r}) on rank {self._job.rank}: {error}") from error
        if self._late:
            raise StrettoError(self._too_late(what, said))
        return [answer.result() for answer in answers]

    def _too_late(self, what: str, said: str) -> str:
        return (
            f"{what}({self.key!r}) on rank {self._job.rank}: the servers have not answered within "
            f"{self._job.timeouts.arrive_s:g} s. {said}\n"
            f"Find out what they do, or allow more time: stretto.init(timeouts=Timeouts(arrive_s=...))."
        )


def declare(job: Job, key: str, begin: Tensor, servers: ParameterServer | None) -> None:
    """All workers of the job together. A refusal is everybody's."""
    fault = _fault_in(key, begin, servers, job)
    which = "" if servers is None else f", servers={servers!r}"
    what = f"{dtype_name(begin.dtype)}{list(begin.shape)}" if isinstance(begin, Tensor) else type(begin).__name__
    mine = f"declare({key!r}, {what}{which})"
    if job.world_size == 1:
        if fault is not None:
            raise ConfigurationError(fault)
        job.declared[key] = OwnTensor(key, begin)
        return
    said: list[tuple[str, str | None]] = job.gather_object((mine, fault))
    for rank, (theirs, refused) in enumerate(said):
        if refused is not None:
            raise ConfigurationError(refused if rank == job.rank else f"rank {rank}: {refused}")
        if theirs != said[0][0]:
            raise ConfigurationError(
                f"rank {rank} calls {theirs}, and rank 0 {said[0][0]}: all workers declare the same, together.\n"
                f"Declare keys at the beginning, in the same order on all workers; only push and pull are for one worker alone."
            )
    value = servers or _usual_servers(job)
    job.declared[key] = ServedTensor(job, network_of(job, value, job.world_size), key, begin, value.replicas)


def find(job: Job, what: str, key: str) -> StoredTensor:
    """The declared key, or what to do about it."""
    stored = job.declared.get(key)
    if stored is None:
        known = ", ".join(map(repr, sorted(job.declared))) or "none"
        raise ConfigurationError(
            f"{what}({key!r}) on rank {job.rank}: no such key was declared; these were: {known}.\n"
            f"Call stretto.declare({key!r}, tensor) before, on all workers together: it opens the way to the servers."
        )
    job.check_usable()
    assert isinstance(stored, StoredTensor)
    return stored


def as_pushed(stored: StoredTensor, values: Tensor | float, op: str, rank: int) -> Tensor:
    """`values` as a tensor of the key's own shape and dtype; anything else is refused, and nothing is sent."""
    asked = f"push({stored.key!r}) on rank {rank}"
    if op not in get_args(PushOp):
        raise ConfigurationError(
            f'{asked}: op={op!r} is not known. Write op="add", or op="assign" to put it in the place of the old.'
        )
    if isinstance(values, (int, float)):
        values = torch.tensor(values, dtype=stored.dtype)
    if not isinstance(values, Tensor):
        raise ConfigurationError(
            f"{asked}: {type(values).__name__} is neither a tensor nor a number. Push a tensor like the declared."
        )
    if values.layout is not torch.strided:
        raise ConfigurationError(
            f"{asked} with a tensor of layout {values.layout}: all elements travel. Write tensor.to_dense()."
        )
    if values.shape != stored.shape or values.dtype != stored.dtype:
        raise ConfigurationError(
            f"{asked}: a {dtype_name(values.dtype)}{list(values.shape)}, and the key was declared with "
            f"{dtype_name(stored.dtype)}{list(stored.shape)}.\nPush what has that shape and dtype, or declare another key."
        )
    return values


def _fault_in(key: str, begin: object, servers: object, job: Job) -> str | None:
    if not isinstance(key, str) or not 0 < len(key) <= MAX_LETTERS:
        return (
            f"declare({key!r:.300}): a key is a text of 1 to {MAX_LETTERS} letters. Write for instance declare('seen', tensor)."
        )
    if key in job.declared:
        return f"declare({key!r}): this key was declared before, and is declared once. Choose another name, or push to it."
    if not isinstance(begin, Tensor):
        return f"declare({key!r}, {type(begin).__name__}): give a tensor, such as torch.zeros(()) for one number."
    if servers is not None and not isinstance(servers, ParameterServer):
        return f"declare({key!r}, servers={servers!r}): write for instance servers=ParameterServer(shards=2, replicas=1)."
    if begin.layout is not torch.strided:
        return f"declare({key!r}) with a tensor of layout {begin.layout}: servers keep all elements. Write tensor.to_dense()."
    if begin.dtype not in SERVED_DTYPES:
        return (
            f"declare({key!r}) with {dtype_name(begin.dtype)}: servers keep float32 values, which cannot hold all of those.\n"
            f"Convert it, if float32 will do: tensor.float(). It counts exactly up to 2**24."
        )
    num_bytes = VALUE_BYTES * begin.numel()
    if not 0 < num_bytes <= MAX_BYTES:
        return (
            f"declare({key!r}) with {begin.numel()} elements: a key has 1 to {MAX_BYTES // VALUE_BYTES}. "
            f"Declare several keys for what is larger."
        )
    if servers is not None and servers.snapshots is not None:
        return f"declare({key!r}, servers={servers!r}): snapshots are of models. Leave snapshots= out; save what you have pulled."
    if servers is not None and servers.answers is not None:
        return f"declare({key!r}, servers={servers!r}): what is pulled is what was pushed, as float32. Leave answers= out."
    try:
        _ = servers is None or servers.num_servers(job.world_size, number_dedicated(job))
    except ConfigurationError as error:
        return f"declare({key!r}): {error}"
    return None


def _usual_servers(job: Job) -> ParameterServer:
    """The servers that there are, started apart or for a model; otherwise one beside rank 0."""
    if number_dedicated(job):
        return ParameterServer(placement="dedicated")
    return ParameterServer(shards=min(job.server_networks, default=1), placement="beside")


def _bounds_of(model: ServedModel) -> list[tuple[int, int]]:
    """The first and the last + 1 element of each range."""
    bounds, start = [], 0
    for each in model.layout().ranges:
        bounds.append((start, start + each.numel))
        start += each.numel
    return bounds
