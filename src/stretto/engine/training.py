"""What a way of training does, and when it is asked: the contract between the hooks and each answer of a strategy.

The engine (`engine.py`) watches one model and its optimizers: autograd, forwards, steps, changes of parameters. It knows nothing
of other workers. A `Training` knows nothing of hooks: it is told what happens, and decides what is exchanged, who waits and who
steps. One strategy has one kind of Training (`Strategy.bind`), one distributed model one object of it.

The order of calls, k = 1, 2, ... counting rounds:

    arrange                          when the model is distributed, and again between rounds when its parameters have changed
      adopt                          after that: parameters that are new, or whose gradients came before they had a place
    before_forward, before_use ...   any number, also without a backward
    round_begins  of round k         before the first bucket of a round is filled
    bucket_ready  of round k         for buckets that may leave early, in the order in which their last gradients come
    backward_ended  of round k       exactly once for each round that has begun, well or not
    before_step, after_step          any number between rounds
    state, load_state, close         between rounds

Threads: all calls come from the thread that trains, or from autograd's thread for a device while the former waits in backward;
never two at a time. `bucket_ready` runs in the middle of backward and must not wait for other workers. `backward_ended`,
`before_step`, `after_step`, `before_forward` and `before_use` may wait, each with a deadline. None is called while an exception
is in flight: a backward that failed is ended at the next forward, backward or step.

Complete, and closed. A gradient is *complete* when everything that it is made of is here (`is_complete`): each bucket carries
what concerns its own parameters, so this does not depend on other buckets. The round is *closed* when it is known that no
worker's backward has failed and that no late gradient is missing, which nobody can know before the last backward has ended.
What was applied cannot be taken back, so a step uses what is complete and closed, never what is merely complete. A Training
that updates parameters across the step (cross-barrier) starts its exchanges in `bucket_ready`, does not wait in `backward_ended`,
lets nobody step in `before_step` but notes the optimizer's options, and in `before_use` waits for the round to be closed and for
these parameters to be complete before it updates them and returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.engine.bucket import Bucket
from stretto.engine.loop_state import LoopState
from stretto.engine.watch import Watch
from stretto.job import Job
from stretto.plan.profile import StepProfile
from stretto.plan.transfers import TransferPlan

if TYPE_CHECKING:
    from stretto.strategy import Strategy

Named = tuple[str, Tensor]
TensorsByName = dict[str, dict[str, Tensor]]  # parameter -> kind -> value
B = TypeVar("B", bound=Bucket)

EVERYBODY: Final = None  # all parameters of the optimizer step
NOBODY: Final[frozenset[Tensor]] = frozenset()


class Participation(Enum):
    """How this worker takes part in a round."""

    WORKING = "with its gradients"
    EMPTY = "it has accumulated nothing"
    FAILED = "its backward ended in an exception"
    ABSENT = "out of data"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a Training is bound to, beside its strategy and its job. It must not hold on to the engine: see `weak_hook.py`."""

    model: nn.Module
    name: str  # of the model, for messages; the same on all workers
    channel: int  # of this model's collectives
    loop: LoopState
    check_finite: bool
    called: nn.Module  # what the training loop calls: the model, or what torch.compile has made of it
    scaler: Any = None  # the GradScaler that was given to distribute()
    profile: list[StepProfile | None] | None = None  # that was given to distribute(): one, on rank 0 alone; None: none was given
    broadcast_buffers: bool = True  # buffers are to be equal on all workers


class RoundEnd(NamedTuple):
    """How a backward has ended here."""

    participation: Participation
    late: Mapping[Tensor, Tensor]  # parameter -> gradient that came after its bucket had left


class RoundResult(NamedTuple):
    """What has come of a round."""

    combined: bool  # p.grad holds what this way of training promises
    anybody_present: bool = True  # whether any worker still has data
    some_unused: bool = False  # some parameter had no gradient on some worker: it may have been frozen
    final: bool = False  # nothing may be added to these gradients before a step has used them
    arrange_anew: bool = False  # `arrange` is to be called again, on all workers, before anything else


class TrainingState(NamedTuple):
    """What a Training remembers from step to step, as it is saved. `own` is this worker's, `shared` the same on all."""

    rounds: int
    own: TensorsByName
    shared: TensorsByName


class Training(ABC, Generic[B]):
    """One way to train, for one model in one job. See the module's text for when each method is called."""

    waits_before_use: bool = False  # whether `before_use` is to be called at all
    watches_first: bool = False  # `before_use` is not needed before it has asked to be arranged anew: it is seen who reads what
    plans_with_times: bool = True  # if its schedule does at all
    wants_arranging: bool = False  # without rounds, instead of their `arrange_anew`: `arrange` is to be called after this step
    profile: StepProfile | None = None  # how a step was measured, where something is planned by it
    plan: TransferPlan | None = None  # which gradients travel together, and in which order
    engaged: bool = True  # otherwise there is nothing to do, and no hook is set: the plain loop
    no_second_mean: str | None = None  # the answer that does not allow adding to a mean that no step has used, if there is one
    state_text: str | None = None  # what its state belongs to, so that none of another kind is taken; None: it never has one
    placement: str = ""  # what else decides which worker keeps what of its own: state of another one goes through `shared_out`
    goes_on_without: bool = False  # whether it needs no worker but this one, or its group: others may die
    replicas_differ: bool = False  # each worker has parameters, buffers and optimizer state of its own: they are saved for each
    is_in_slices: bool = False  # state of the optimizers is in slices, each on one worker: it comes back by collectives
    parameters_in_slices: bool = False  # the parameters are too, but while a module computes with them
    no_join: str | None = None  # why workers cannot run out of data at different times, if so

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        """Begin, on all workers, after these have agreed on the model and the strategy and hold the same parameters."""

    # -- before anything is sent --------------------------------------------------------------------------------------

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        """Raise `ConfigurationError` if the answers of the strategy do not go together. Called when a strategy is made."""

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        """Raise `ConfigurationError` if this model cannot be trained so. Must not communicate: the refusal is told to all."""

    # -- parameters ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[B]:
        """Which gradients travel together: buckets of the `dense` parameters, in the order in which they are expected.

        `sparse` have gradients that no bucket can hold. No buckets: gradients stay this worker's own, and no round begins."""

    def is_current(self) -> bool:
        """Whether `arrange` would give the same again for the same parameters, although what `auto` chose, or what this
        remembers, has been replaced."""
        return True

    def adopt(self, new: Sequence[Tensor], found: Sequence[Named]) -> None:
        """Parameters that came later: make the values of `new` equal on all workers, and combine the gradients that `found`
        have already, for their buckets came too late."""

    # -- a round ------------------------------------------------------------------------------------------------------

    def round_begins(self) -> None:
        """The first gradient of a round has come, or one begins that will have none. Buckets are about to be filled: what is left
        of the last round must have ended."""

    def is_stale(self, parameter: Tensor) -> bool:
        """Whether a forward may have read this parameter before it was brought up to date. Asked when its gradient comes, if
        `waits_before_use`."""
        return False

    @abstractmethod
    def bucket_ready(self, bucket: B) -> None:
        """The bucket holds all its gradients. From here on nobody writes to it until the round has ended."""

    @abstractmethod
    def backward_ended(self, end: RoundEnd) -> RoundResult:
        """The round ends. Buckets that are not `sent` are filled and have yet to leave, in whatever order.

        On return `p.grad` is what the strategy promises after backward; after an exception it is None."""

    def is_complete(self, parameter: Tensor) -> bool:
        """Whether all that this parameter's gradient of the round under way is made of has arrived. Does not wait."""
        return False

    # -- forwards and steps -------------------------------------------------------------------------------------------

    def before_forward(self, buffers: Watch | None, *, saved: bool) -> None:
        """A forward that a backward may follow. `buffers`: make these equal on all workers, for it is in training mode;
        `saved`: a backward to come may still read what they hold now."""

    def before_use(self, parameters: Iterable[Tensor]) -> None:
        """Return when these parameters hold the values that the next forward is to see. Called if `waits_before_use`: before the
        forward of every module that has parameters of its own, before `state_dict`, and by `stretto.synchronize`."""

    def before_load(self) -> None:
        """The model's or an optimizer's state is about to be replaced: what is under way must have ended. Called if
        `waits_before_use`, also after a failure."""

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        """Which parameters step: `EVERYBODY`, `NOBODY`, or only those given. For the others `p.grad` is None during the step."""
        return EVERYBODY

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""

    def whole_parameters(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Within it these parameters can be read and written, if all workers write the same. All workers enter it together."""
        return nullcontext()

    def hook_model(self) -> None:
        """The engine has set its hooks on the model: whoever has its own there may set them after these."""

    def show_parameters(self) -> None:
        """All parameters are about to be copied: they are to have their values until training goes on. On all workers."""

    def finish(self) -> None:
        """The user calls `stretto.synchronize`, and nobody has accumulated anything; or the model is about to be released: take
        the steps that are left, on all workers. May wait, and must begin no collective."""

    # -- what is remembered -------------------------------------------------------------------------------------------

    def state(self) -> TrainingState:
        """A copy of all that has to be saved."""
        return TrainingState(0, {}, {})

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        """What in `own` or `shared` of a saved state cannot belong to this model, in words, or None."""
        return None

    def load_state(self, state: TrainingState) -> None:
        """Go on from there. Replaces all that is remembered."""

    def before_save(self) -> None:
        """All workers are in `stretto.save`, and none takes a step before it has ended: bring the parameters up to date. May
        wait, and must begin no collective of all workers: one that fails here goes on to the next of `save`."""

    def result_shown(self) -> AbstractContextManager[None]:
        """Within it the model holds what `stretto.save` is to write: where replicas differ, their mean. All workers enter it
        together, after `before_save` has ended well on all of them, so what begins it may be a collective."""
        return nullcontext()

    def own_model(self) -> dict[str, dict[str, Tensor]]:
        """Within `result_shown`: what of the model is this worker's own and not what is shown, if `replicas_differ`. Parameters
        and buffers, each by name."""
        return {}

    def load_own_model(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The reverse, before `load_state`: where as many workers go on as have saved."""

    def before_release(self) -> None:
        """The model is being distributed anew, on all workers, and none takes a step before it is: what this keeps elsewhere
        comes back into the model and its optimizers. May wait; a collective of all workers that begins here must be one that
        fails on all of them if it fails."""

    def begin_anew(self) -> None:
        """`stretto.load` has replaced the model, its optimizers and, where `load_state` was called, what this remembers, on all
        workers: whoever else keeps them takes them over. May communicate."""

    def shared_out(self, everybody: Sequence[TensorsByName]) -> TensorsByName:
        """What one worker begins with of its own, where another number of workers have saved `everybody`'s."""
        return {}

    def catching_up(self) -> AbstractContextManager[None]:
        """At the end of `join` everybody becomes equal to one worker, outside of it: all that is not so already."""
        return nullcontext()

    def close(self) -> None:
        """No further call comes. Nothing is sent."""
