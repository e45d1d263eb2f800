"""The hooks on one model: from a gradient that autograd has made to a Training that is told of it.

A *round* is one synchronised backward. Gradient hooks put each gradient into its bucket; a bucket that is full is handed to the
Training, or waits for the end of backward if it may not leave early. When backward has ended the Training gets the rest, and
leaves in `p.grad` what its strategy promises.

    forward            marks the beginning; parameters that have changed get their places
    gradient hook      p.grad -> bucket; p.grad = None while the bucket is under way: autograd cannot add to memory in flight
    end of backward    from a hook on the model's outputs: that of the outermost backward, even under re-entrant checkpointing
    next forward,      close a round that was left open: its backward ended in an exception
    backward or step

Training need not pass the model's own forward: parts of it may be called, or another method, or a compiled graph into which hooks
do not lead. Then what the forward would have done is done at the end of the round, and before the step where there was no round.

Rounds are numbered, not steps. A gradient that comes after its bucket has left (a parameter used twice under re-entrant
checkpointing) is late: it is kept aside for the end of the round. A second backward before the step is one more round over what
is there.

Reference: Li et al., "PyTorch Distributed", VLDB 2020, for buckets and hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.engine import misuse
from stretto.engine.admission import unwrapped
from stretto.engine.bucket import Bucket, refuse_graph
from stretto.engine.end_of_backward import NO_TASK, EndOfBackward, current_task
from stretto.engine.finite import FiniteCheck
from stretto.engine.loop_state import LoopState
from stretto.engine.only_traced import are_others, in_functional_call, is_only_traced, leads_to_training
from stretto.engine.other_trainers import refuse_other_trainers, refuse_wrapper_around
from stretto.engine.places import Places
from stretto.engine.stepping import (
    Given,
    PutAside,
    can_be_postponed,
    look_before_step,
    stepped_by,
    watch_all_optimizers,
)
from stretto.engine.training import Participation, RoundEnd, RoundResult, Setting, Training
from stretto.engine.use_hooks import ReadElsewhere, Readers, before_each_use
from stretto.engine.weak_hook import Orphan, take_off, weakly, when_accumulated
from stretto.job import PUBLIC_CHANNEL, Job
from stretto.plain_state import ForwardHook
from stretto.plan.profile import StepProfile
from stretto.tensors_in import tensors_in

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class Engine:
    """Binds a strategy to one model in one job. Made by `distribute`; the model and the optimizers hold on to it, nobody else.

    When all are gone it goes with them, without a word to other workers; what is under way ends by itself or at its deadline.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        strategy: Strategy,
        job: Job,
        *,
        check_finite: bool = False,
        broadcast_buffers: bool = True,
        scaler: Any = None,
        profile: list[StepProfile | None] | None = None,
    ) -> None:
        self.called = model
        self.model = unwrapped(model)  # whose names are those of a plain model, also under torch.compile
        self.strategy = strategy
        self.job = job
        self.broadcast_buffers = broadcast_buffers
        self.loop = LoopState(optimizers, scaler)
        channel = job.new_channel()
        self.name = f"{type(self.model).__name__} (model {channel - PUBLIC_CHANNEL})"
        self.training: Training[Any] = strategy.bind(
            job, Setting(self.model, self.name, channel, self.loop, check_finite, model, scaler, profile, broadcast_buffers)
        )
        self.synchronising = self.engaged = self.training.engaged
        self.rounds = 0
        self._open = False  # a gradient of this round has come
        self._buffers_saved = False  # a forward has come whose backward has not: autograd may have saved buffers
        self._passed_forward = False  # since the last round: the model's own forward has run, or backward has gone through it
        self._looked = False  # since the last step: for parameters that have changed
        self._look_closely = False  # some parameter had no gradient somewhere: it may have been frozen
        self._task = NO_TASK  # the backward at whose end the round closes
        self._died = False  # that backward has ended in an exception
        self._left_over: list[Tensor] = []  # the gradients that were there then
        self._late: dict[Tensor, Tensor] = {}  # parameter -> gradient that came after its bucket had left
        self._final = False  # p.grad holds what no step has used and nothing may be added to
        self._aside = PutAside()
        self._hooks = [handle for optimizer in optimizers for handle in Given.hook(self, optimizer)]
        self._use_hooks: list[RemovableHandle] = []
        self._readers = Readers(self.model) if self.engaged and self.training.watches_first else None
        self._read_elsewhere: ReadElsewhere = {}
        self._orphan = Orphan(job)
        self.attached: list[RemovableHandle] = []  # what others have put onto the model and its optimizers for this engine
        if self.engaged:
            watch_all_optimizers()
            try:
                self._lay_out()
            except BaseException:
                take_off(self._hooks)
                self.training.close()
                raise
            self._hooks.append(model.register_forward_pre_hook(ForwardHook(self._before_forward)))
            self._hooks.append(model.register_forward_hook(ForwardHook(self._after_forward)))
        elif check_finite:  # in a job of one nothing is combined, but what was asked to be checked is
            self._check_alone(FiniteCheck())

    def __reduce__(self) -> Any:
        """A module whose class copies or pickles its own `__dict__` (torch.fx does) finds None in the engine's place."""
        return type(None), ()

    @property
    def buckets(self) -> list[Bucket]:
        return self.places.buckets if self.engaged else []

    @property
    def joining(self) -> bool:
        """Whether workers may run out of data at different times."""
        return self.loop.joining

    def combines(self, parameter: Tensor) -> bool:
        """Whether the gradient of this parameter is one of those that the Training sees."""
        return self.engaged and parameter in self.places.known

    def close(self) -> None:
        """Take every hook off the model and the optimizers again."""
        take_off((*self._hooks, *self._use_hooks, *self.attached))
        if self._readers is not None:
            self._readers.close()
        if self.engaged:
            take_off(self.places.hooks.values())
        self.synchronising = self.engaged = False
        self._open, self._task = False, NO_TASK
        self._aside.give_back()
        self.training.close()

    # -- which parameters there are -----------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Give every parameter that wants a gradient its place. Done again when that set changes."""
        with torch.inference_mode(False):  # what is made in it could not be part of a training step
            self.places = Places(self.model, self.training)
        self._slots = self.places.slots
        self.places.set_hooks(self._on_gradient, self._on_last_gradient, self._on_own_gradient, self._orphan)
        take_off(self._use_hooks)
        if self.training.waits_before_use and self._readers is None:
            self._use_hooks = before_each_use(self.model, self.called, self.loop.optimizers, self.training, self._read_elsewhere)

    def choices_loaded(self) -> None:
        """What `auto` chose, or what the Training remembers, has been replaced, on all workers. No round may be open."""
        if self.engaged and not self.training.is_current():
            self._arrange_anew()

    def _arrange_anew(self) -> None:
        """The Training has seen enough to make a better arrangement. Gradients that are there move to their new places."""
        if self._readers is not None:
            self._read_elsewhere = self._readers.conclude()
            self._readers = None
        take_off(self.places.hooks.values())
        self._lay_out()
        self.places.take_in()

    def _notice_changes(self) -> list[Tensor] | None:
        """Parameters frozen, unfrozen, added or converted since the last step get their place, on all workers alike.

        Gives those that have a place now and had none; None if the model has other parameters for the length of a call."""
        if not self.places.watch.changed(closely=self._look_closely):
            self._looked, self._look_closely = True, False
            return []
        if are_others(self.places.watch.members()):
            return None
        refuse_other_trainers(self.model)
        self._looked, self._look_closely = True, False
        known, placed = self.places.known, self.places.hooks
        take_off(placed.values())
        self._lay_out()
        self.training.adopt([p for p in self.model.parameters() if p not in known], ())
        return [p for p in self.places.hooks if p not in placed]

    def _notice_late_changes(self) -> None:
        """The same where gradients are there already: those of parameters that have got a place only now are not combined yet."""
        if found := set(self._notice_changes() or ()):
            self.training.adopt((), [(name, p) for name, p in (*self.places.dense, *self.places.sparse) if p in found])

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if not leads_to_training(module):
            return
        refuse_wrapper_around(module)
        self.flush()
        if self._notice_changes() is None:
            return
        shares = self._shares_buffers
        if module.training and torch.is_grad_enabled() and not (shares and in_functional_call()):
            self._passed_forward = True
        else:
            shares = False
        self.training.before_forward(self.places.watch if shares else None, saved=self._buffers_saved)
        self._buffers_saved |= torch.is_grad_enabled()

    @property
    def _shares_buffers(self) -> bool:
        return self.broadcast_buffers and self.synchronising and not self.joining

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if is_only_traced() or not torch.is_grad_enabled() or current_task() != NO_TASK or not self.buckets:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(weakly(self._on_backward_begins))  # type: ignore[no-untyped-call]

    def _on_backward_begins(self, gradient: Tensor) -> None:
        if self._died:
            self.flush()  # an earlier backward ended in an exception, and there was no forward since
        self._passed_forward = True  # also where it runs for a second time through the same graph
        self._set_end()  # not of a backward within a backward: the round closes with the outer one

    def _set_end(self) -> None:
        if self._task == NO_TASK and self.synchronising:
            self._task = current_task()
            EndOfBackward(self, self.rounds)

    def backward_died(self, number: int) -> None:
        if number == self.rounds:  # else its round has been closed since
            self._left_over = [p.grad for p in self.places.parameters if p.grad is not None]
            self._died = True

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        """Runs once per parameter and backward. Small gradients are copied later, all at once, when their bucket is full."""
        if self.training.waits_before_use and self.training.is_stale(parameter):
            raise misuse.read_too_early(self.name, self.places.name_of(parameter))
        if not self.synchronising:
            self.loop.backwards.add(current_task())  # under no_sync: what it leaves in p.grad has yet to be combined
            return
        if parameter.grad is None:
            return
        bucket, slot = self._slots[number]
        if not self._open or self._died:
            self._begin_round(parameter)
        if bucket.sent:
            self._keep_late(parameter)
            return
        if bucket.large[slot]:
            bucket.put(slot)
        if not bucket.fired[slot]:
            bucket.fired[slot] = True
            bucket.missing -= 1
            if bucket.missing == 0 and bucket.leaves_early:
                bucket.collect()
                bucket.sent = True
                self.training.bucket_ready(bucket)
                bucket.let_go()  # autograd must not add to memory that is under way

    def _on_last_gradient(self, parameter: Tensor) -> None:
        """For a parameter whose bucket leaves last, or with a sparse gradient: it stays in p.grad until the round ends."""
        if self.training.waits_before_use and self.training.is_stale(parameter):
            raise misuse.read_too_early(self.name, self.places.name_of(parameter))
        if not self.synchronising:
            self.loop.backwards.add(current_task())
        elif not self._open or self._died:
            self._begin_round(parameter)

    def _on_own_gradient(self, parameter: Tensor) -> None:
        """Where there are no rounds it concerns nobody but this worker, who must have read what was up to date."""
        if self.training.waits_before_use and self.training.is_stale(parameter):
            raise misuse.read_too_early(self.name, self.places.name_of(parameter))

    def _begin_round(self, parameter: Tensor) -> None:
        if self._died:
            self._close_dead_round(parameter)
        if self._final and parameter in self.places.of:
            self._final = False
            if self.places.holds_result(parameter):
                raise misuse.second_mean(str(self.training.no_second_mean))
        self._open_round()
        for bucket in self.buckets:
            bucket.leaves_early = bucket.early and not self.places.is_watched(bucket)
        self._set_end()  # normally the outputs' hook has done it; else (a submodule called directly) this is the end we know

    def _open_round(self) -> None:
        self._open = True
        self.training.round_begins()
        self.places.leave_held_memory()

    def _close_dead_round(self, parameter: Tensor) -> None:
        """A backward begins after one that failed, and no forward of the model has come between them to close its round."""
        fresh = parameter.grad
        if any(fresh is old for old in self._left_over):
            raise misuse.left_over(self.name)
        self.flush()
        self._died = False
        parameter.grad = fresh

    def _keep_late(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        refuse_graph(gradient)
        before = self._late.get(parameter)
        self._late[parameter] = gradient.detach() if before is None else before + gradient.detach()
        parameter.grad = None

    # -- the end of a round -------------------------------------------------------------------------------------------

    def end_of_backward(self) -> None:
        if self._open:
            passed_forward = self._passed_forward
            self._finish_round(Participation.WORKING)
            if not passed_forward and not self.joining:
                self._make_up_for_forward()
        self._task = NO_TASK

    def _make_up_for_forward(self) -> None:
        """The round has not passed the model's own forward: do what that would have done, for this round and the next forward."""
        self._notice_late_changes()
        if self.model.training and self._shares_buffers:
            self.training.before_forward(self.places.watch, saved=self._buffers_saved)

    def _finish_round(self, participation: Participation) -> RoundResult:
        """Fill what has not left, and let the Training end the round."""
        if not self._open:  # no gradient has come that would have done it
            self._open_round()
        self.places.complete()  # what it refuses leaves the round open: nothing of the rest has left, and flush says so
        self._task = NO_TASK
        self._final = False
        used = [p for bucket in self.buckets for p, here in zip(bucket.parameters, bucket.used, strict=True) if here]
        try:
            result = self.training.backward_ended(RoundEnd(participation, self._late))
        finally:
            self._reset()
        if self._readers is not None:
            self._readers.round_ended(used)
        if result.arrange_anew:
            self._arrange_anew()
        self._look_closely |= result.some_unused
        self._final = result.final
        self.loop.rounds += result.combined
        return result

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._late.clear()
        self._open = self._died = False
        self._left_over = []
        self._buffers_saved = self._passed_forward = False
        self.loop.round_ended()
        self.rounds += 1

    # -- rounds without gradients -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Close a round that backward has left open: it ended in an exception, for otherwise its end would have come."""
        if self._open or self._task != NO_TASK:
            self._task = NO_TASK
            self._late.clear()
            self.places.drop_gradients()
            self._finish_round(Participation.FAILED)

    def shadow_round(self) -> bool:
        """Take part in one round with nothing to give; says whether anybody is still working."""
        self.places.drop_gradients()
        return self._finish_round(Participation.ABSENT).anybody_present

    def synchronize(self) -> None:
        """Combine now what backward passes under no_sync have accumulated, if anybody has anything. On all workers.

        A worker that has nothing takes part with weight 0: the mean is over those that have something. Where nothing is combined
        it takes this worker alone."""
        if not self.engaged:
            return
        if not self.synchronising:
            raise misuse.synchronize_in_no_sync(self.name)
        self.flush()
        self.settle()
        if self.training.goes_on_without:
            return  # a gradient is this worker's own, and nobody else needs to come here
        on_mean = bool(self.loop.backwards) and self._final and any(self.places.holds_result(p) for _, p in self.places.dense)
        if not self.loop.anybody_has_accumulated(self.job, on_mean, self.training.no_second_mean):
            self.training.finish()
            return
        if self.loop.backwards:
            self._finish_round(Participation.WORKING)
        else:
            self.places.drop_gradients()
            self._finish_round(Participation.EMPTY)
        if not self.joining:
            self._make_up_for_forward()

    def settle(self) -> None:
        """Return when nothing is under way: every parameter is up to date, or has its gradient. Begins no collective."""
        if self.engaged and self.training.waits_before_use:
            self.training.before_use(self.model.parameters())

    def settle_or_forget(self) -> None:
        """The same before all of it is given up or replaced: after a failure there is nothing left to settle."""
        if self.engaged and self.training.waits_before_use:
            self.training.before_load()

    # -- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to use the gradients that are there."""
        if self.engaged:
            if current_task() != NO_TASK:
                raise misuse.step_within_backward(optimizer, self.name)
            self._aside.give_back()  # the step before this one has ended in an exception
            self.flush()
            look_before_step(self, optimizer)
            if not self._looked:
                self._notice_late_changes()
            self._looked = False
            self.loop.look_for_scaler()
            if self.training.waits_before_use and not can_be_postponed(optimizer, self):
                self.settle()
            if self._readers is not None and not self.buckets:  # there are no rounds, at whose end it would be told
                self._readers.round_ended(p for p in self.model.parameters() if p.grad is not None)
            stepping = self.training.before_step(optimizer)
            if stepping is not None:
                self._aside.put(parameter for parameter in stepped_by(optimizer, self) if parameter not in stepping)
        self._final = False

    def after_step(self, optimizer: Optimizer) -> None:
        self._aside.give_back()
        self.loop.stepped(optimizer)
        self.training.after_step(optimizer)
        if self.training.wants_arranging:
            self._arrange_anew()

    # -- for the user -------------------------------------------------------------------------------------------------

    def _check_alone(self, finite: FiniteCheck) -> None:
        self._finite = finite
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._hooks.append(when_accumulated(parameter, self._look_alone, name, orphan=self._orphan))

    def _look_alone(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._finite.look(name, parameter.grad)
            self._finite.conclude(self.job, [parameter.grad])

    @contextmanager
    def not_synchronising(self) -> Iterator[None]:
        before, self.synchronising = self.synchronising, False
        try:
            yield
        finally:
            self.synchronising = before
