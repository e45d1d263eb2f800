"""The base of ways to train in which every worker steps a copy of the model of its own.

    arrange         no buckets: gradients stay this worker's            begun        all workers hold the same values
    step            every worker's own optimizer
    after_step      all given optimizers have ended one more step       stepped(k)   what is due is exchanged

A subclass says in `stepped` what is exchanged, and in `average` how the mean over workers is taken. This base counts steps, keeps
the parameters as one vector (`weights`), refuses what cannot be trained so, and handles everything that follows from the copies
being different:

    consensus    `meet`: the mean of all copies, and of buffers, is put into the model on all workers
    saving       the model in the file is the mean; each worker's own copy, buffers and optimizer state are saved beside it, so
                 that as many workers go on with the same bits. Another number of workers begins from the mean
    distribute   again: all workers begin from the mean, unless the program has written values of its own since the last step
    release      each worker keeps its own copy, because nothing may be sent then; the log says so

Buffers: with buffers="broadcast", the default, they are averaged whenever `average_buffers` is called; with "local" left alone.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.own_weights import admission
from stretto.aggregate.own_weights.bringing_together import OwnValues
from stretto.aggregate.own_weights.buffers import average_buffers
from stretto.aggregate.own_weights.flat_weights import FlatWeights, sum_of_squares
from stretto.engine.bucket import Bucket
from stretto.engine.state import copy_tensors
from stretto.engine.training import EVERYBODY, Named, RoundEnd, RoundResult, Setting, TensorsByName, Training, TrainingState
from stretto.engine.watch import Watch
from stretto.errors import ConfigurationError
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy

log = logging.getLogger("stretto")

WHOLE = ""  # under this name what a subclass remembers that is no vector of values for parameters


class OwnWeights(Training[Bucket]):
    """Every worker steps its own copy. Subclasses say what is exchanged after a step."""

    placement = "own weights"  # what is remembered has no meaning in one optimizer's `state_dict`, so none of it is put there

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._strategy, self._job, self._setting = strategy, job, setting
        self._optimizers = setting.loop.optimizers
        self.engaged = job.world_size > 1
        self.no_join = f"sync={strategy.sync!r}: a worker's steps are its own, and one that has run out of data takes none"
        self.steps = 0  # of all given optimizers that have ended here: the least over them
        self._ended = [0] * len(self._optimizers)
        self._named: list[Named] = []
        self._kinds: dict[str, object] = {}
        self._written: list[int] = []  # autograd's count of writes to each parameter, after the last step or exchange
        self._own: OwnValues | None = None  # while the mean is in the model, and this worker's copy is to come back
        self._to_save: OwnValues | None = None  # between `before_save` and `result_shown`
        self._mean_is_there = False  # and nobody has stepped since
        self.is_together = True  # all workers hold the same values
        self._begins_anew = False  # the program has written other values into the model, which is distributed again
        self._to_load: TrainingState | None = None  # until it is known where parameters lie
        self._loaded = False  # `load_state` was called, and `begin_anew` has yet to be
        admission.check_scaler(setting, strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        admission.check_model(model, optimizers, strategy)

    # -- for subclasses -----------------------------------------------------------------------------------------------

    @abstractmethod
    def stepped(self, step: int) -> None:
        """This step of all optimizers has ended: exchange what is due. May wait, with a deadline."""

    def begun(self) -> None:
        """All workers hold the same values now (or a returning one has pulled a model): begin from here."""

    def settle(self) -> None:
        """Wait for what is under way: before saving, `consensus` and another `distribute`. Begins no collective."""

    def moved(self) -> None:
        """`stretto.consensus` has put the mean into the model, on all workers, and the next step begins there."""

    def average(self, values: Tensor) -> Tensor:
        """The mean over all workers, the same bits on all; `values` may be overwritten. float32 or float64, on any device."""
        return self._job.all_reduce(values, "mean", label=f" for the mean of {self._setting.name}")

    def weighted_mean(self, values: Tensor) -> Tensor:
        """`average`, for weights: where workers' copies do not count equally, it is the mean that they converge to."""
        return self.average(values)

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite these tensors, on all workers, by those of the first."""
        copy_tensors(self._job, tensors)

    def own_extra(self) -> dict[str, Tensor]:
        """What this worker remembers, by name, for a checkpoint. Vectors as long as the weights are kept by parameter."""
        return {}

    def load_own_extra(self, saved: Mapping[str, Tensor]) -> None:
        """The reverse. Empty where another number of workers has saved: begin anew."""

    def shared_extra(self) -> dict[str, Tensor]:
        """The same for what is equal on all workers."""
        return {}

    def load_shared_extra(self, saved: Mapping[str, Tensor]) -> None:
        """The reverse."""

    def device_of_weights(self) -> torch.device | None:
        """Where the vector of the weights is wanted. None: where the parameters are."""
        return None

    # -- parameters ---------------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        named = self._in_order((*dense, *sparse))
        if self._named:
            admission.refuse_change(self._setting.name, self._named, self._kinds, named)
        else:
            self._named, self._kinds = named, {name: admission.kind_of(parameter) for name, parameter in named}
            self.weights = FlatWeights(named, self.device_of_weights())
            self.replicas_differ = True
            self._note_written()
            self.begun()
            self._load()
        return ()

    def _in_order(self, named: Sequence[Named]) -> list[Named]:
        place = {name: number for number, (name, _) in enumerate(self._setting.model.named_parameters())}
        return sorted(named, key=lambda each: place[each[0]])

    def average_buffers(self) -> None:
        """Unless they are "local". All workers call it together."""
        if self._setting.broadcast_buffers:
            average_buffers(Watch(self._setting.model), self.average, self.copy_first)

    # -- no rounds ----------------------------------------------------------------------------------------------------

    def bucket_ready(self, bucket: Bucket) -> None:
        raise AssertionError("there are no buckets")

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        return RoundResult(combined=False)

    # -- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        self._job.check_usable()
        if self._own is not None:
            raise ConfigurationError(
                f"a step of {type(optimizer).__name__} inside `with stretto.consensus(model)`: {self._setting.name} holds the "
                f"mean of all workers there, and each gets its own weights back at the end, so the step would be lost.\n"
                f"Step after the block; or call stretto.consensus(model) without `with`, and train on from the mean."
            )
        admission.check_step(optimizer, self._named, self._strategy, self._job, self._setting)
        if self._mean_is_there:
            self._mean_is_there = False
            self.moved()
        return EVERYBODY

    def after_step(self, optimizer: Optimizer) -> None:
        """A step of an optimizer that was not given to `distribute` is not counted: it only changes this worker's copy."""
        self.is_together = False
        number = next((number for number, given in enumerate(self._optimizers) if given is optimizer), None)
        if number is not None:
            self._ended[number] += 1
        while self.steps < min(self._ended):
            self.steps += 1
            self._job.ledger.own_steps += 1
            self.stepped(self.steps)
        self._note_written()

    def _note_written(self) -> None:
        self._written = [parameter._version for _, parameter in self._named]

    def _is_untouched(self) -> bool:
        """Whether nobody has written to the parameters since the last step or exchange."""
        return self._written == [parameter._version for _, parameter in self._named]

    # -- the mean of all copies ---------------------------------------------------------------------------------------

    def own_values(self) -> OwnValues:
        """A copy of what this worker has of its own: parameters, and buffers unless they are "local"."""
        buffers = Watch(self._setting.model).buffers() if self._setting.broadcast_buffers else []
        return OwnValues(self.weights.read(), [(buffer, buffer.detach().clone()) for buffer in buffers])

    def meet(self, own: OwnValues) -> float:
        """Put the mean of all copies into the model, on all workers; nothing may be under way. Gives the consensus distance,
        sqrt(mean_i |x_i - mean|^2)."""
        mean = self.weighted_mean(own.weights.clone())
        apart = sum_of_squares(own.weights - mean)
        distance = math.sqrt(float(self.average(apart)[0]))
        self.weights.write(mean)
        self.average_buffers()
        self._note_written()
        self._mean_is_there = True
        self._job.ledger.consensus_distance = distance
        if self._job.tracer is not None:
            self._job.tracer.sample(f"consensus distance of {self._setting.name}", self._job.tracer.now(), {"distance": distance})
        return distance

    @property
    def holds_mean(self) -> bool:
        """Whether the mean is in the model, and nobody has stepped since it was put there."""
        return self._mean_is_there

    def take_mean(self) -> tuple[float, OwnWeights, OwnValues]:
        """`stretto.consensus`: the distance, and what this worker had of its own."""
        self._refuse_within_consensus("stretto.consensus")
        self.settle()
        own = self.own_values()
        distance = self.meet(own)
        self.is_together = True
        return distance, self, own

    def lend(self, own: OwnValues) -> None:
        """From `meet` to `put_back` nobody may step."""
        self._own = own

    def put_back(self, own: OwnValues) -> None:
        """This worker gets its own copy back."""
        self.weights.write(own.weights)
        own.put_back_buffers()
        self._note_written()
        self._own, self._mean_is_there, self.is_together = None, False, False

    def _refuse_within_consensus(self, what: str) -> None:
        if self._own is not None:
            raise ConfigurationError(
                f"{what} inside `with stretto.consensus(model)`: each worker's own weights are put aside there.\n"
                f"Call it after the block. (The model in a checkpoint is the mean anyway.)"
            )

    # -- what is remembered -------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        if self.replicas_differ:
            self._refuse_within_consensus("stretto.save")
            self.settle()
            self._to_save = self.own_values()

    @contextmanager
    def result_shown(self) -> Iterator[None]:
        own, self._to_save = self._to_save, None
        if own is None:
            yield
            return
        before = self._mean_is_there, self.is_together
        self.meet(own)
        self.lend(own)
        try:
            yield
        finally:
            self.put_back(own)
            self._mean_is_there, self.is_together = before

    def own_model(self) -> dict[str, dict[str, Tensor]]:
        """Parameters that equal the mean to the last bit, as they do right after an exchange, are left out."""
        assert self._own is not None, "within result_shown"
        own = self._own.weights
        parameters = {} if torch.equal(own, self.weights.read()) else self.weights.by_name(own)
        return {"parameters": parameters, "buffers": self._own.buffers_by_name(self._setting.model)}

    def load_own_model(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        here = dict((*self._setting.model.named_parameters(), *self._setting.model.named_buffers()))
        with torch.no_grad():
            for values in saved.values():
                for name, value in values.items():
                    here[name].copy_(value)

    def state(self) -> TrainingState:
        if self._begins_anew or not self._named:
            return TrainingState(self.steps, {}, {})
        return TrainingState(self.steps, self._by_parameter(self.own_extra()), self._by_parameter(self.shared_extra()))

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        sizes = {name: parameter.numel() for name, parameter in self._setting.model.named_parameters() if parameter.requires_grad}
        for name, values in saved.items():
            for kind, value in values.items():
                if not isinstance(value, Tensor):
                    return f"{kind} of {name} is a {type(value).__name__}, not a tensor"
                if name != WHOLE and value.numel() != sizes.get(name):
                    here = sizes.get(name, "is not trained here")
                    return f"{kind} of {name} has {value.numel()} elements, the parameter {here}"
        kinds = {kind for name, values in saved.items() if name != WHOLE for kind in values}
        missing = next(((name, kind) for name in sizes for kind in kinds if kind not in saved.get(name, {})), None)
        return None if missing is None else f"{missing[1]} of {missing[0]} is missing"

    def load_state(self, state: TrainingState) -> None:
        self.steps = state.rounds
        self._ended = [self.steps] * len(self._ended)
        self._loaded, self._to_load = True, state
        if self._named:
            self._load()

    def _load(self) -> None:
        """What was saved, once it is known where the parameters lie."""
        state, self._to_load = self._to_load, None
        if state is not None:
            self.load_remembered(state.own, state.shared)

    def load_remembered(self, own: TensorsByName, shared: TensorsByName) -> None:
        self.load_own_extra(self._as_vectors(own))
        self.load_shared_extra(self._as_vectors(shared))

    def _by_parameter(self, extra: Mapping[str, Tensor]) -> TensorsByName:
        out: TensorsByName = {}
        for kind, value in extra.items():
            whole = {WHOLE: value.clone()} if value.shape != (self.weights.numel,) else self.weights.by_name(value)
            for name, part in whole.items():
                out.setdefault(name, {})[kind] = part
        return out

    def _as_vectors(self, saved: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        out = {kind: value.clone() for kind, value in saved.get(WHOLE, {}).items()}
        kinds = dict.fromkeys(kind for name, values in saved.items() if name != WHOLE for kind in values)
        for kind in kinds:
            out[kind] = self.weights.from_names({name: values[kind] for name, values in saved.items() if name != WHOLE})
        return out

    def begin_anew(self) -> None:
        self._note_written()
        if not self._loaded:
            self.steps, self._ended = 0, [0] * len(self._ended)
            if self._named:
                self.begun()
        self._loaded = self._mean_is_there = False

    def before_release(self) -> None:
        """All workers distribute the model again: they go on from the mean, unless the program has written other values on some
        worker since the last step."""
        if self._loaded or not self._named:  # just made, and equal on all
            return
        self._refuse_within_consensus("stretto.distribute")
        self.settle()
        touched = torch.tensor([float(not self._is_untouched())], dtype=torch.float32, device=self.weights.device)
        self._begins_anew = bool(self.average(touched)[0] > 0)
        if not self._begins_anew:
            self.meet(self.own_values())
        self.is_together = True

    def close(self) -> None:
        if self._named and not self.is_together and self._job.rank == 0:
            log.warning(
                "%s was released after step %d with each worker's own weights in it, which differ. Call stretto.consensus(model) "
                "on all workers before stretto.release(model), to have their mean.", self._setting.name, self.steps,
            )  # fmt: skip
