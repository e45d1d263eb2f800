"""A model on servers that step: how its values and its optimizers' state get there, and how they come back.

    arrange              values and state that rank 0 has      -->   every range on its servers
                         values                               <--
    before_save          values                               <--
    state_dict           the state of an optimizer            <--
    before_release       values, and the state of all         <--
    close                the state of all, if it is not here  <--   and the service ends

What happens in between, a step of training, is in `stepping.py`.

Saving. `optimizer.state_dict()` fetches the state from the servers, and `release` leaves it in the optimizer: both are torch's
own. `stretto.save` has all workers pull what the servers have when all have come, and `stretto.load` fills them anew. What waits
for company on a server at that time (less than one update of `SoftSync` or `BackupWorkers`) is not saved.

Invariant: the optimizers here have no state of what the servers keep, but for the length of a `state_dict` and after `release`.
           Once a wait has failed, every later step and every later look at the state raise what it failed with.
Cost:      m bytes and the state up once, by rank 0; m bytes down to each worker then and before each save, and the state to
           each that asks for it.
"""

from __future__ import annotations

import logging
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.aggregate.all_reduce.admission import warn_of_lost_gradients
from stretto.aggregate.all_reduce.compression_state import mean_of
from stretto.aggregate.parameter_server import stepping_admission as admission
from stretto.aggregate.parameter_server.answers import OwnCopies, answer_codecs
from stretto.aggregate.parameter_server.client import Export, Fill, Pull, PulledPayload
from stretto.aggregate.parameter_server.inventory import Inventory, Kept, KeptParameter, as_state
from stretto.aggregate.parameter_server.layout import ParameterRange
from stretto.aggregate.parameter_server.messages import ValuesPulled
from stretto.aggregate.parameter_server.network import network_of
from stretto.aggregate.parameter_server.push_encoding import PushEncoding
from stretto.aggregate.parameter_server.server_record import ServerLedger
from stretto.aggregate.parameter_server.service import ServedModel
from stretto.aggregate.parameter_server.snapshot_subject import begin_snapshots
from stretto.aggregate.parameter_server.snapshots import SnapshotTaker, prepare_folder
from stretto.aggregate.parameter_server.step_under_way import (
    bounds_of,
    held_longest,
    optimizer_of,
    too_late,
)
from stretto.aggregate.parameter_server.sync_spec import SyncSpec
from stretto.aggregate.parameter_server.training import clients_of, servers_of
from stretto.aggregate.parameter_server.use_order import UseOrder, range_bytes_for_steps
from stretto.collectives.urgency import Urgency
from stretto.engine.bucket import Bucket
from stretto.engine.training import Named, Setting, TensorsByName, Training, TrainingState
from stretto.errors import PeerLost, StrettoError
from stretto.job import Job
from stretto.protocol.loop import Running
from stretto.sync.asynchronous import Asynchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy

AT_ONCE: Final = 8  # ranges with their optimizer state under way: the rest waits here, not in a server's memory
log = logging.getLogger("stretto.parameter_server")


class ModelOnServers(Training[Bucket]):
    """All of `SteppingServers` but the steps."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._strategy, self._job, self._setting = strategy, job, setting
        self._sync: Any = strategy.sync
        self._optimizers = setting.loop.optimizers
        self.engaged = job.world_size > 1
        if not self.engaged and (folder := servers_of(strategy).snapshots) is not None:
            log.warning("a job of one worker has no servers, so no snapshots are written to %s: call stretto.save", folder)
        self._network = network_of(job, servers_of(strategy), len(clients_of(strategy, job))) if self.engaged else None
        self._service: Running | None = None
        self._named: Sequence[Named] = ()
        self._dtypes: dict[str, torch.dtype] = {}
        self._written: dict[Tensor, int] = {}  # autograd's count of writes to each parameter, after the last pull
        self._known: TensorsByName = {}  # of a checkpoint, for the next service to begin with
        self._own: TensorsByName = {}  # residuals of a checkpoint, likewise
        self._rounds_before = 0  # in which gradients were compressed, of the training that this one goes on from
        self._broken: StrettoError | None = None
        self._snapshots: SnapshotTaker | None = None
        self.steps_before = 0  # of the training that this one goes on from
        self._handles: list[RemovableHandle] = []
        self._fetched: set[int] = set()  # optimizers whose state is here for the length of a `state_dict`
        self._left: TrainingState | None = None  # what was remembered, once the model and the optimizers hold the rest again
        if self.engaged and (self._decays or any(p.dtype is not torch.float32 for p in setting.model.parameters())):
            self.state_text = f"{strategy.compress!r} and sync={self._sync!r}"
        if self.engaged and not strategy.compress.lossless:
            self.state_text = f"{strategy.compress!r} and sync={self._sync!r}"
            if job.rank == 0:
                warn_of_lost_gradients(setting.model, strategy.compress)

    @property
    def _method(self) -> Any:
        return self._sync.delay_compensation if isinstance(self._sync, Asynchronous) else None

    @property
    def _decays(self) -> bool:
        return self._method is not None and self._method.decay is not None

    # -- what is served -----------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        """No buckets. Called again, the parameters have changed: another device is fine, other parameters are not."""
        place = {name: number for number, (name, _) in enumerate(self._setting.model.named_parameters())}
        named = sorted((*dense, *sparse), key=lambda each: place[each[0]])
        if self._service is not None:
            admission.refuse_change(self._setting.name, self._named, self._dtypes, named)
            return ()
        self._named, self._dtypes = named, {name: parameter.dtype for name, parameter in named}
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_state_dict_pre_hook(self._fetch_state))
            self._handles.append(optimizer.register_state_dict_post_hook(self._drop_state))
        self._serve()
        return ()

    def _serve(self) -> None:
        """Have the servers begin with what this worker's model and optimizers hold. All workers call it together."""
        assert self._network is not None
        self._broken = self._left = None
        self._inventory = Inventory(self._named, self._optimizers, self._method, self._known, self._strategy.compress)
        schedule, num_servers = self._strategy.schedule, len(self._network.servers)
        model = ServedModel(
            parameters=self._inventory.parameters, servers=self._network.servers, workers=clients_of(self._strategy, self._job),
            replicas=servers_of(self._strategy).replicas, sync=SyncSpec.of(self._sync), optimizers=self._inventory.specs,
            range_bytes=range_bytes_for_steps(schedule, self._inventory.parameters, num_servers),
            codecs={group: repr(each) for group, each in self._inventory.compressions.items()},
            answers="" if (answers := servers_of(self._strategy).answers) is None else repr(answers),
            steps_before=self.steps_before,
        )  # fmt: skip
        if self._job.life:
            self._service, model, self._job.first_step = self._network.enter(model, self)
            self.steps_before = model.steps_before
        self._ranges = model.layout().ranges
        how = answer_codecs(self._ranges, model.parameters, model.answers)
        self._copies = OwnCopies(how) if model.answers else None
        self._encoding = PushEncoding(self._job.rank, self._inventory, self._ranges, self._own)
        self._own = {}
        self._entry_of = {each.parameter: each for each in self._inventory.entries}
        self._order = UseOrder(schedule, self._inventory.entries, model.range_bytes, num_servers)
        self._bounds = bounds_of(self._ranges)
        self._clocks = [self._job.first_step if self._job.life else 0] * len(self._optimizers)
        self._versions = [0] * len(self._ranges)
        self._flat = self._inventory.flat_values()
        if not self._job.life:
            self._service = self._network.begin(model, self)
            problem = self._job.gather_object(self._fill() if self._job.rank == 0 else None)[0]
            if problem is not None:
                raise StrettoError(f"the servers could not begin with {self._setting.name}: {problem}")
        self._known = {}
        for optimizer in self._optimizers:
            self._clear_state(optimizer)  # it is on the servers
        self._pull_all()
        self._ahead_of_versions = [self._ahead(number) for number in range(len(self._optimizers))]
        if self._service is None:
            return
        if not self._job.life:
            self._job.barrier()  # nobody pushes before all have the values that training begins with
        self._snapshots = begin_snapshots(
            self._strategy, self._job, self._setting, self._network, self._service, self._inventory, self._ranges,
            self.steps_before,
        )  # fmt: skip
        if self._snapshots is not None:
            weakref.finalize(self, self._snapshots.end).atexit = False

    def _ahead(self, optimizer: int) -> int:
        """By how much this worker's clock exceeds the version that all ranges of the optimizer have. 0 unless it came back."""
        clock, known = self._clocks[optimizer], zip(self._ranges, self._versions, strict=True)
        return clock - min((version for each, version in known if optimizer_of(each) == optimizer), default=clock)

    def _fill(self) -> str | None:
        folder = servers_of(self._strategy).snapshots
        try:
            if folder is not None:
                prepare_folder(Path(folder))
            fills = [self._begin_with(each) for each in self._ranges]
            self._a_few_at_a_time(fills, "to take the values that training begins with")
        except StrettoError as error:
            return str(error)
        return None

    def _begin_with(self, each: ParameterRange) -> Fill:
        start, stop = self._bounds[each.index]
        values = self._flat[start:stop]
        content = self._inventory.content(each, values)
        return Fill(each.index, values.numpy().data) if content is None else Fill(each.index, content, exported=True)

    def _pull_all(self) -> None:
        self._finish_all()
        pulls = [self._pull(each, self._clocks[optimizer_of(each)], -1, whole=True) for each in self._ranges]
        self._wait(pulls, "for the values")
        self._take(self._ranges, pulls)

    def server_ledgers(self) -> dict[int, ServerLedger]:
        """What the servers have counted of this model; nothing where there is one worker and no server."""
        return {} if self._network is None or self._service is None else self._network.ledgers(self._service)

    def close(self) -> None:
        """Leaves the state of the servers in the optimizers, if they answer, and waits for no worker."""
        for handle in self._handles:
            handle.remove()
        if self._network is None or self._service is None or self._job.closed:
            return
        try:
            if self._left is None:
                for optimizer in self._optimizers:
                    self._fetch_state(optimizer)
        except StrettoError as problem:
            log.warning("the optimizer's state of %s is lost with the servers that kept it: %s", self._setting.name, problem)
        self._end_service()

    def before_release(self) -> None:
        """Values and state as the servers have them, now that nobody pushes; but not where the program has written its own."""
        if self._service is None:
            return
        if self._is_untouched:
            self._pull_all()
        self._left = self.state()
        for optimizer in self._optimizers:
            self._fetch_state(optimizer)
        self._fetched.clear()  # it stays, beyond a `state_dict`

    @property
    def _is_untouched(self) -> bool:
        """Whether nobody but this has written to the parameters."""
        return all(self._written.get(parameter) == parameter._version for _, parameter in self._named)

    def _end_service(self) -> None:
        assert self._network is not None and self._service is not None
        if self._snapshots is not None:
            self._snapshots.end()
            self._snapshots = None
        self._network.end(self._service)
        self._service = None

    # -- values -------------------------------------------------------------------------------------------------------

    def _pull(
        self, each: ParameterRange, clock: int, newer_than: int, urgency: Urgency | None = None, *, whole: bool = False
    ) -> Future[ValuesPulled]:
        """`whole`: as the servers have them, also where they send differences."""
        assert self._service is not None
        start, stop = self._bounds[each.index]
        if self._copies is not None:
            draw = self._rounds_before + clock
            wanted = self._copies.wanted(each.index, draw, whole=whole)
            written: Future[PulledPayload] = self._service.request(Pull(each.index, clock, None, newer_than, urgency, wanted))
            return self._copies.into(each, written, self._flat[start:stop], draw)
        if self._encoding.has_rounded(each.group):
            answer: Future[PulledPayload] = self._service.request(Pull(each.index, clock, None, newer_than, urgency))
            return self._encoding.into(each, answer, self._flat[start:stop])
        return self._service.request(Pull(each.index, clock, self._flat.numpy()[start:stop].data, newer_than, urgency))

    def _take(self, ranges: Iterable[ParameterRange], pulls: Iterable[Future[ValuesPulled]]) -> None:
        """The values have come: they become those of the parameters."""
        here = set()
        for each, pull in zip(ranges, pulls, strict=True):
            self._versions[each.index] = pull.result().version
            here.add(optimizer_of(each))
        self._copy(entry for entry in self._inventory.entries if entry.optimizer in here)

    def _copy(self, entries: Iterable[KeptParameter]) -> None:
        """What has been pulled becomes the parameters' values. A forward may be running around this."""
        with torch.inference_mode(False), torch.no_grad():
            for entry in entries:
                entry.parameter.copy_(self._flat[entry.start : entry.stop].view(entry.parameter.shape))
                self._written[entry.parameter] = entry.parameter._version

    def _bytes_down(self, each: ParameterRange) -> int:
        return self._encoding.bytes_down(each) if self._copies is None else self._copies.bytes_down(each)

    @abstractmethod
    def _finish_all(self) -> None:
        """Steps that are under way end, and their values are here."""

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, answers: Sequence[Future[Any]], what: str) -> None:
        """Until all have come, one has failed, or it is too late."""
        begin_ns, patience_s = time.perf_counter_ns(), self._job.timeouts.arrive_s
        done, missing = wait(answers, patience_s, FIRST_EXCEPTION)
        self._job.ledger.count_wait(time.perf_counter_ns() - begin_ns)
        if self._job.tracer is not None:
            held = held_longest(done)
            why = "" if held is None else f", because of rank {held.waited_for} ({type(self._sync).__name__})"
            self._job.tracer.span("wait", f"{what}{why}", begin_ns)
        for answer in done:
            if (problem := answer.exception()) is not None:
                self._broken = self._explained(problem)
                raise self._broken
        if missing:
            after = f"{', '.join(map(str, self._clocks))} steps. With sync={self._sync!r}"
            self._broken = error = too_late(f"{self._setting.name}: rank {self._job.rank}", what, patience_s, after)
            assert self._network is not None and self._service is not None
            self._network.give_up(self._service, error)
            raise error

    def _explained(self, problem: BaseException) -> StrettoError:
        """The same error; if a part of the model is lost, it also says from which snapshot to go on."""
        if isinstance(problem, PeerLost) and self._snapshots is not None:
            return PeerLost(problem.rank, f"{problem.reason}.\n{self._snapshots.advice(time.time())}")
        return problem if isinstance(problem, StrettoError) else StrettoError(f"a request has failed: {problem!r}")

    def _a_few_at_a_time(self, requests: Sequence[Fill | Export], what: str) -> list[Any]:
        assert self._service is not None
        results: list[Any] = []
        for start in range(0, len(requests), AT_ONCE):
            answers = [self._service.request(request) for request in requests[start : start + AT_ONCE]]
            self._wait(answers, what)
            results += [answer.result() for answer in answers]
        return results

    # -- what servers remember ----------------------------------------------------------------------------------------

    def _export(self, ranges: Sequence[ParameterRange]) -> dict[str, Kept]:
        if self._broken is not None:
            raise self._broken
        self._finish_all()
        with nullcontext() if self._snapshots is None else self._snapshots.exporting:
            exported = self._a_few_at_a_time([Export(each.index) for each in ranges], "for the state of the servers")
        return self._inventory.read((each, found.content) for each, found in zip(ranges, exported, strict=True))

    def _fetch_state(self, optimizer: Optimizer) -> None:
        """Before `state_dict`. A state that the program has loaded stays."""
        number = next(number for number, given in enumerate(self._optimizers) if given is optimizer)
        if self._service is None or any(optimizer.state.get(each.parameter) for each in self._inventory.entries):
            return
        kept = self._export([each for each in self._ranges if optimizer_of(each) == number])
        self._fetched.add(number)
        for entry in self._inventory.entries:
            if entry.optimizer == number and entry.name in kept and (state := as_state(kept[entry.name], entry.parameter)):
                optimizer.state[entry.parameter] = state

    def _drop_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """After `state_dict`: whoever asked has it now."""
        for number, given in enumerate(self._optimizers):
            if given is optimizer and number in self._fetched:
                self._fetched.discard(number)
                self._clear_state(optimizer)

    def _clear_state(self, optimizer: Optimizer) -> None:
        """Drop the state that the servers keep. Frozen parameters have theirs here."""
        for each in self._inventory.entries:
            optimizer.state.pop(each.parameter, None)

    def before_save(self) -> None:
        if self._service is not None:
            self._pull_all()

    def begin_anew(self) -> None:
        if self._service is not None:
            self._end_service()
            self._serve()

    def state(self) -> TrainingState:
        """What neither the model nor `optimizer.state_dict()` holds: values in float32 of parameters that are not, or that travel
        rounded, means of squared gradients of delay compensation, and what was left out of this worker's gradients."""
        if self._left is not None:
            return self._left
        if self.state_text is None or self._service is None:
            return TrainingState(0, {}, {})
        shared = self._inventory.beyond_torch(self._export(self._ranges))
        return TrainingState(self._rounds_before + max(self._clocks, default=0), self._encoding.state(), shared)

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        return self._inventory.fault_in(saved) if self._service is not None else None

    def load_state(self, state: TrainingState) -> None:
        self._known, self._own, self._rounds_before = dict(state.shared), dict(state.own), state.rounds

    def shared_out(self, everybody: Sequence[TensorsByName]) -> TensorsByName:
        return mean_of(everybody, self._job.world_size)
