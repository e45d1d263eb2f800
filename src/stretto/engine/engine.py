"""The life of a step: from a gradient that is ready to one that is combined.

A *round* is one synchronised backward. Gradient hooks put each gradient into its bucket; a bucket that is full leaves (or waits
for the end of backward, if the schedule says so); when backward has ended the rest leaves, the closing bucket last, everything is
waited for, and `p.grad` becomes a view of the combined bucket.

    forward            marks the beginning; parameters that have changed get their places; buffers are broadcast
    gradient hook      p.grad -> bucket; p.grad = None while the bucket is under way: autograd cannot add to memory in flight
    end of backward    from a hook on the model's outputs: that of the outermost backward, even under re-entrant checkpointing
    next forward,      close a round that was left open: its backward ended in an exception
    backward or step

Training need not pass the model's own forward: parts of it may be called, or another method, or a compiled graph into which hooks
do not lead. Then what the forward would have done is done at the end of the round, and before the step where there was no round.

Rounds are numbered, not steps: the k-th round of this worker meets the k-th round of every other, whatever each has done in
between. A gradient that comes after its bucket has left (a parameter used twice under re-entrant checkpointing) is late: it is
kept aside, and one more exchange at the end of the round adds it, on all workers if any has one. Addition is linear, so the
result is the same; for the same reason a second backward before the step is one more round over what is there.

Invariant: after a round all workers hold the same bits in every `p.grad`, or none at all and an error. A worker whose backward
failed closes the round with weight 0 and says so; then nobody gets a gradient, all others raise `BackwardFailed`, and replicas
stay equal.

Reference: Li et al., "PyTorch Distributed", VLDB 2020, for buckets and hooks. Departs from it: collectives carry their name, so
workers need no common order of buckets; which parameters were used rides in the closing bucket, so nothing has to be declared.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.collectives.plan import Kind
from stretto.collectives.staging import Staging
from stretto.compress.state import Exported
from stretto.engine import memory, misuse
from stretto.engine.admission import unwrapped
from stretto.engine.bucket import Bucket, Notes, gradient_dtype, make_buckets, refuse_graph
from stretto.engine.compressing import Compressing
from stretto.engine.end_of_backward import EndOfBackward
from stretto.engine.finite import FiniteCheck
from stretto.engine.late import combine_late
from stretto.engine.loop_state import LoopState
from stretto.engine.only_traced import are_others, in_functional_call, is_only_traced
from stretto.engine.other_trainers import refuse_other_trainers, refuse_wrapper_around
from stretto.engine.sparse import exchange_sparse, sparse_parameters
from stretto.engine.state import copy_buffers, copy_by
from stretto.engine.stepping import Given, watch_all_optimizers
from stretto.engine.watch import Watch
from stretto.engine.weak_hook import Orphan, take_off, weakly, when_accumulated
from stretto.errors import BackwardFailed
from stretto.job import PUBLIC_CHANNEL, Job
from stretto.plain_state import ForwardHook
from stretto.strategy import Strategy
from stretto.tensors_in import tensors_in

KEPT_BUFFERS: Final = 256  # in pinned memory: one for each bucket of a large model
log = logging.getLogger("stretto")
NO_TASK: Final = -1  # autograd's own number for "not in a backward"


class Part(Enum):
    """How this worker takes part in a round."""

    WORKING = "with its gradients"
    FAILED = "its backward ended in an exception"
    ABSENT = "out of data"


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
    ) -> None:
        self.called = model
        self.model = unwrapped(model)  # whose names are those of a plain model, also under torch.compile
        self.strategy = strategy
        self.job = job
        self.broadcast_buffers = broadcast_buffers
        self.loop = LoopState(optimizers, scaler)
        lossy = not strategy.compress.lossless
        self.synchronising = self.engaged = job.world_size > 1 or lossy  # otherwise there is nothing to do, and no hook is set
        self.joining = False
        self.rounds = 0
        self.channel = job.new_channel()
        self.buckets: list[Bucket] = []
        self._compressing = Compressing(job, self.channel, strategy, scaler) if lossy else None
        self._forgotten: tuple[Exported, Exported] = ({}, {})  # of parameters that have no place now: they may get one again
        self._unused_mean = False  # with a lossy compression: p.grad holds a mean that no step has used
        self._finite = FiniteCheck() if check_finite else None
        self._staging = Staging(kept_buffers=KEPT_BUFFERS)
        self._native = strategy.aggregate.algorithm == "native"
        self._sends_early = not (strategy.schedule.waits_for_backward or self._native)  # torch's own need one order everywhere
        self._open = False  # a gradient of this round has come
        self._buffers_saved = False  # a forward has come whose backward has not: autograd may have saved buffers
        self._passed_forward = False  # since the last round: the model's own forward has run, or backward has gone through it
        self._looked = False  # since the last step: for parameters that have changed
        self._task = NO_TASK  # the backward at whose end the round closes
        self._died = False  # that backward has ended in an exception
        self._left_over: list[Tensor] = []  # the gradients that were there then
        self._part = Part.WORKING
        self._late: dict[int, Tensor] = {}
        self._look_closely = False  # some parameter had no gradient anywhere: it may have been frozen
        self._sequence = 0
        self._hooks: list[RemovableHandle] = []
        self._gradient_hooks: dict[Tensor, RemovableHandle] = {}
        self._orphan = Orphan(job)
        self._warned = False  # of gradients that came from no backward
        self.attached: list[RemovableHandle] = []  # what others have put onto the model and its optimizers for this engine
        self.name = f"{type(self.model).__name__} (model {self.channel - PUBLIC_CHANNEL})"
        self._hooks += [handle for optimizer in optimizers for handle in Given.hook(self, optimizer)]
        if self.synchronising:
            watch_all_optimizers()
            self._lay_out()
            self._hooks.append(model.register_forward_pre_hook(ForwardHook(self._before_forward)))
            self._hooks.append(model.register_forward_hook(ForwardHook(self._after_forward)))
        elif check_finite:  # in a job of one
            self._check_alone()

    def __reduce__(self) -> Any:
        """A module whose class copies or pickles its own `__dict__` (torch.fx does) finds None in the engine's place."""
        return type(None), ()

    # -- layout -------------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Give every parameter that wants a gradient its place. Done again when that set changes."""
        with torch.inference_mode(False):  # what is made in it could not be part of a training step
            self._give_places()

    def _give_places(self) -> None:
        sparse = sparse_parameters(self.model)
        named: list[tuple[str, Tensor]] = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.sparse = [(name, p) for name, p in named if p in sparse]
        self.dense = [(name, p) for name, p in named if p not in sparse]
        self._make_buckets()
        self.dense = [(name, p) for bucket in self.buckets for name, p in zip(bucket.names, bucket.parameters, strict=True)]
        self.number: dict[Tensor, int] = {p: index for index, (_, p) in enumerate(self.dense)}
        self.place = {p: (bucket, slot) for bucket in self.buckets for slot, p in enumerate(bucket.parameters)}
        self._slots = [self.place[p] for _, p in self.dense]
        self._label = f" for gradients of {self.name}, layout {_digest(self.buckets, self.sparse):08x}"
        self._known = set(self.model.parameters())
        self._watch = Watch(self.model)
        self._set_gradient_hooks()

    def _make_buckets(self) -> None:
        """What compressions remember is theirs by parameter, wherever that lies now."""
        own, shared = self.memory()
        rounds = self.compressed_rounds
        notes_on = self.job.device if self._native else torch.device("cpu")
        self.buckets = make_buckets(self.dense, self.strategy.schedule, notes_on, self.strategy.compress)
        self.remember(own, shared, rounds)

    def memory(self) -> tuple[Exported, Exported]:
        """What compressions remember, by parameter: this worker's own, and what is the same on all."""
        own, shared = memory.export(self.buckets)
        return self._forgotten[0] | own, self._forgotten[1] | shared

    def remember(self, own: Exported, shared: Exported, rounds: int) -> None:
        """Go on from what `memory` gave, here or elsewhere. The buckets must be fresh."""
        memory.restore(self.buckets, own, shared, rounds, self.job.rank, self.job.world_size)
        here = {name for bucket in self.buckets for name in bucket.names}
        elsewhere = ({n: v for n, v in part.items() if n not in here} for part in (own, shared))
        self._forgotten = (next(elsewhere), next(elsewhere))

    def load_memory(self, own: Exported, shared: Exported, rounds: int) -> None:
        """Replace all that compressions remember."""
        for bucket in self.buckets:
            bucket.forget()
        self.remember(own, shared, rounds)

    @property
    def compressed_rounds(self) -> int:
        return next((bucket.state.rounds for bucket in self.buckets if bucket.state is not None), 0)

    def _set_gradient_hooks(self) -> None:
        last = [p for p, large in zip(self.closing.parameters, self.closing.large, strict=True) if not large]
        waits = set(last)
        self._gradient_hooks = {}
        for number, (_, parameter) in enumerate(self.dense):
            if parameter not in waits:
                hook = when_accumulated(parameter, self._on_gradient, number, orphan=self._orphan)
                self._gradient_hooks[parameter] = hook
        for parameter in (*last, *(parameter for _, parameter in self.sparse)):
            self._gradient_hooks[parameter] = when_accumulated(parameter, self._on_last_gradient, orphan=self._orphan)

    def _notice_changes(self) -> list[Tensor] | None:
        """Parameters frozen, unfrozen, added or converted since the last step get their place, on all workers alike.

        Gives those that have a place now and had none; None if the model has other parameters for the length of a call."""
        if not self._watch.changed(closely=self._look_closely):
            self._looked, self._look_closely = True, False
            return []
        if are_others(self._watch.members()):
            return None
        refuse_other_trainers(self.model)
        self._looked, self._look_closely = True, False
        known, placed = self._known, self._gradient_hooks
        take_off(placed.values())
        self._lay_out()
        new = [p for p in self.model.parameters() if p not in known]
        copy_by(partial(self._broadcast, f" of new parameters{self._label}"), new)
        return [p for p in self._gradient_hooks if p not in placed]

    def _notice_late_changes(self) -> None:
        """The same where gradients are there already: what has got a place only now is combined here and now."""
        if found := set(self._notice_changes() or ()):
            dense = [(name, p) for name, p in self.dense if p in found]
            combined_weight = combine_late(self.job, dense, self._weight)
            exchange_sparse(self.job, [(name, p) for name, p in self.sparse if p in found], self._weight, combined_weight)

    def _broadcast(self, label: str, tensor: Tensor) -> Tensor:
        """Rank 0's. It has its place in the stream of this engine's rounds: whoever is elsewhere in it is found out at once."""
        name = (self.channel, self._sequence & 0xFFFFFFFF)
        self._sequence += 1
        return self.job.broadcast(tensor, name=name, label=f"{label} before round {self.rounds}")

    @property
    def closing(self) -> Bucket:
        return self.buckets[-1]

    def combines(self, parameter: Tensor) -> bool:
        """Whether the gradient of this parameter is one of those it combines."""
        return self.engaged and parameter in self._known

    def close(self) -> None:
        """Take every hook off the model and the optimizers again."""
        take_off((*self._hooks, *self._gradient_hooks.values(), *self.attached))
        self.synchronising = self.engaged = False
        self._open, self._task = False, NO_TASK
        if self._compressing is not None:
            self._compressing.stop()

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if is_only_traced() or torch.is_inference_mode_enabled():
            return
        if _current_task() != NO_TASK:  # a forward within backward is the recomputation of a checkpointed one
            return
        if not (module.training or torch.is_grad_enabled()):
            return
        self.job.whereabouts.claim(self.channel)  # on a GPU, backward waits in a thread of autograd's
        refuse_wrapper_around(module)
        self.flush()
        if self._notice_changes() is None:
            return
        if module.training and torch.is_grad_enabled() and not (self._shares_buffers and in_functional_call()):
            self._passed_forward = True
            self._share_buffers()
        self._buffers_saved |= torch.is_grad_enabled()

    def _share_buffers(self) -> None:
        if self._shares_buffers:
            broadcast = partial(self._broadcast, f" of the buffers of {self.name}, for a forward in training mode")
            copy_buffers(self.job, self._watch, broadcast, saved=self._buffers_saved)

    @property
    def _shares_buffers(self) -> bool:
        return self.broadcast_buffers and self.synchronising and not self.joining and self.job.world_size > 1

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if is_only_traced() or not torch.is_grad_enabled() or _current_task() != NO_TASK:
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
            self._task = _current_task()
            EndOfBackward(self, self.rounds)

    def _note_accumulation(self) -> None:
        """A backward under no_sync: what it leaves in p.grad has yet to be combined."""
        self.loop.backwards.add(_current_task())

    def backward_died(self, number: int) -> None:
        if number == self.rounds:  # else its round has been closed since
            self._left_over = [p.grad for _, p in (*self.dense, *self.sparse) if p.grad is not None]
            self._died = True

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        """Runs once per parameter and backward. Small gradients are copied later, all at once, when their bucket is full."""
        if not self.synchronising:
            return self._note_accumulation()
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
            if bucket.missing == 0 and self._sends_early and not bucket.waits and bucket is not self.closing:
                bucket.collect()
                self._send(bucket)
                bucket.let_go()  # autograd must not add to memory that is under way

    def _on_last_gradient(self, parameter: Tensor) -> None:
        """Of a parameter in the closing bucket, or with a sparse gradient: it stays where it is until the round closes."""
        if not self.synchronising:
            self._note_accumulation()
        elif not self._open or self._died:
            self._begin_round(parameter)

    def _begin_round(self, parameter: Tensor) -> None:
        if self._died:
            self._close_dead_round(parameter)
        if self._unused_mean and parameter in self.place:
            self._unused_mean = False
            if self._holds_mean(parameter):
                raise misuse.second_mean(self.strategy.compress)
        self._open_round()
        if self._sends_early:
            for bucket in self.buckets[:-1]:
                bucket.waits = self._is_watched(bucket)
        self._set_end()  # normally the outputs' hook has done it; else (a submodule called directly) this is the end we know

    def _open_round(self) -> None:
        self._open = True
        for bucket in self.buckets:
            if bucket.is_held:
                bucket.leave_memory()

    def _close_dead_round(self, parameter: Tensor) -> None:
        """A backward begins after one that failed, and no forward of the model has come between them to close its round."""
        fresh = parameter.grad
        if any(fresh is old for old in self._left_over):
            raise misuse.left_over(self.name)
        self.flush()
        self._died = False
        parameter.grad = fresh

    def _is_watched(self, bucket: Bucket) -> bool:
        """Whether a hook of the user's runs after ours. It must see the gradient: the bucket leaves at the end of backward."""
        hooks = [p._post_accumulate_grad_hooks for p in bucket.parameters]
        if max(map(len, hooks)) == 1:
            return False
        last = (next(reversed(mine)) for mine in hooks)
        return any(self._gradient_hooks[p].id != number for p, number in zip(bucket.parameters, last, strict=True))

    def _holds_mean(self, parameter: Tensor) -> bool:
        """Whether the gradient is what a round has left there. A mean of means is the mean only without loss: a new gradient of
        this worker's would lie on top of everybody's old one."""
        bucket, slot = self.place[parameter]
        return parameter.grad is bucket.views[slot]

    def _keep_late(self, parameter: Tensor) -> None:
        number, gradient = self.number[parameter], parameter.grad
        assert gradient is not None
        refuse_graph(gradient)
        self._late[number] = gradient.detach() if number not in self._late else self._late[number] + gradient.detach()
        parameter.grad = None

    @property
    def _weight(self) -> float:
        return self.job.weight if self._part is Part.WORKING else 0.0

    def _send(self, bucket: Bucket) -> None:
        _weigh(bucket.gradients, self._weight)
        if self._finite is not None:
            for name, view in bucket.named_views:
                self._finite.look(name, view)
        bucket.sent = True
        if self._compressing is None:
            self._reduce(bucket)
        elif bucket is self.closing:
            self._compressing.start_closing(bucket, sequence=self._first_number(bucket), label=self._label + self._loop_label())
        else:
            sequence, absent = self._first_number(bucket), self._part is Part.ABSENT
            self._compressing.start(bucket, sequence=sequence, label=self._label, absent=absent, weight=self._weight)

    def _first_number(self, bucket: Bucket) -> int:
        """Of the bucket's collectives in this round."""
        return self._sequence + bucket.number * self._numbers_per_bucket

    @property
    def _numbers_per_bucket(self) -> int:
        return 1 if self._compressing is None else self._compressing.numbers_per_bucket

    def _reduce(self, bucket: Bucket) -> None:
        """Begin the bucket's all-reduce; from a GPU, once its copy has arrived in host memory."""
        label = self._label + (self._loop_label() if bucket is self.closing else "")
        if self._native:
            self.job.all_reduce(bucket.flat, "mean", "native", label=label)
            return
        flat, ready, bucket.bring_back = self._staging.lend(bucket.on_wire, bucket.notes if bucket is self.closing else None)
        name = (self.channel, self._first_number(bucket) & 0xFFFFFFFF)
        algorithm = self._algorithm(bucket.num_bytes)
        bucket.pending = self.job.start(Kind.ALL_REDUCE, flat, algorithm, op="mean", name=name, ready=ready, label=label)

    def _loop_label(self) -> str:
        """What the workers' loops must agree on. Not under `join`, where a worker that has run out takes no steps."""
        if self.joining or self._part is Part.ABSENT or self.job.world_size == 1:
            return ""
        return self.loop.text()

    def _algorithm(self, num_bytes: int) -> str:
        algorithm = self.strategy.aggregate.algorithm
        return self.job.choose(num_bytes) if algorithm == "auto" else algorithm

    # -- the end of a round -------------------------------------------------------------------------------------------

    def end_of_backward(self) -> None:
        if self._open:
            passed_forward = self._passed_forward
            self._finish_round(Part.WORKING)
            if not passed_forward and not self.joining:
                self._make_up_for_forward()
        self._task = NO_TASK

    def _make_up_for_forward(self) -> None:
        """The round has not passed the model's own forward: do what that would have done, for this round and the next forward."""
        self._notice_late_changes()
        if self.model.training:
            self._share_buffers()

    def _finish_round(self, part: Part) -> Notes:
        """Send what has not left, wait for everything, and give every parameter its combined gradient."""
        if not self._open:  # no gradient has come that would have done it
            self._open_round()
        used = self._complete_buckets()  # what it refuses leaves the round open: nothing of the rest has left, and flush says so
        self._part, self._task = part, NO_TASK
        try:
            self._send_rest(used)
            self._receive()
            return self._hand_out()
        except BaseException as error:
            if isinstance(error, Exception):
                self._let_finish()
            self._settle(good=False)
            raise
        finally:
            self._reset()

    def _let_finish(self) -> None:
        """After an error: other buckets may be under way, and their memory is not free until they have arrived or failed too."""
        for bucket in self.buckets:
            for under_way in (bucket.pending, bucket.errand):
                if under_way is not None:
                    with suppress(Exception):
                        under_way.wait()

    def _send_rest(self, used: list[bool]) -> None:
        notes = Notes(self._weight, bool(self._late), self._part is Part.FAILED, self._part is not Part.ABSENT)
        for bucket in self.buckets[:-1]:
            if not bucket.sent:
                self._send(bucket)
        self.closing.write(notes, used)
        if self._compressing is not None:
            self._compressing.look_at(p.grad for _, p in self.sparse if p.grad is not None)
        self._send(self.closing)

    def _complete_buckets(self) -> list[bool]:
        """Fill the places of parameters that got no gradient in this round; say which have one."""
        for bucket in self.buckets:
            if not bucket.sent:
                bucket.collect()
        for _, parameter in self.sparse:
            if parameter.grad is not None:
                refuse_graph(parameter.grad)
        return [used for bucket in self.buckets for used in bucket.used]

    def _take_back(self, used: list[bool]) -> None:
        """A parameter without a gradient anywhere keeps `p.grad = None`, so what was said of it in this round is not heard."""
        if self._compressing is not None and not all(used):
            unused = {name for (name, _), somewhere in zip(self.dense, used, strict=True) if not somewhere}
            for bucket in self.buckets:
                if bucket.turn is not None:
                    bucket.turn.state.keep_as_it_was([place for place in bucket.layout.places if place.name in unused])

    def _settle(self, *, good: bool) -> None:
        if self._compressing is not None:
            self._compressing.settle(self.buckets, good=good)

    def _receive(self) -> None:
        try:
            if self._compressing is not None:
                self._compressing.receive(self.buckets)
            for bucket in self.buckets:
                if bucket.pending is not None:
                    bucket.pending.wait()
                if bucket.bring_back is not None:
                    bucket.bring_back()
        except BaseException:
            self._drop_gradients()  # they are neither this worker's nor combined
            raise

    def _hand_out(self) -> Notes:
        notes, shares = self.closing.read()
        used = [share > 0 for share in shares]
        if notes.failed:
            self._settle(good=False)
            self._give_up()
            return notes
        if notes.late:
            self._add_late(used)
        for bucket in self.buckets:
            if notes.weight not in (1.0, 0.0) and bucket.compression.hands_out == "mean":
                bucket.gradients.div_(notes.weight)
        if notes.infinite:
            for bucket in self.buckets:
                bucket.gradients.fill_(torch.nan)
        self._take_back(used)
        self._settle(good=not notes.infinite and notes.present > 0)
        self._unused_mean = self._compressing is not None and not notes.infinite
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self._look_closely |= min(shares, default=1.0) < 1.0 - 0.5 / self.job.world_size  # somebody had none
        if not all(used):
            for (_, parameter), somewhere in zip(self.dense, used, strict=True):
                if not somewhere:
                    parameter.grad = None
        if notes.present:
            self.job.ledger.count_round(staleness=0)  # everybody's contribution is of this very round
        self._combine_sparse(notes.weight)
        if self._finite is not None:
            combined = [*(bucket.gradients for bucket in self.buckets), *(p.grad for _, p in self.sparse if p.grad is not None)]
            self._finite.conclude(self.job, combined)
        self.loop.rounds += 1
        return notes

    def _add_late(self, used: list[bool]) -> None:
        """One more exchange, of the gradients that came after their bucket had left."""
        flags = torch.zeros(len(self.dense), dtype=torch.float32, device="cpu")
        flags[list(self._late)] = 1.0
        self.job.all_reduce(flags, op="max", algorithm="ring")
        for number in flags.nonzero().flatten().tolist():
            name, parameter = self.dense[number]
            bucket, slot = self.place[parameter]
            late = self._late.get(number, torch.zeros_like(parameter)).to(gradient_dtype(parameter)).contiguous().clone()
            _weigh(late, self._weight)
            if self._finite is not None:
                self._finite.look(name, late)
            bucket.views[slot].add_(self.job.all_reduce(late, op="mean", algorithm="ring"))
            used[number] = True

    def _combine_sparse(self, combined_weight: float) -> None:
        if self._finite is not None and self._weight:
            for name, parameter in self.sparse:
                self._finite.look(name, parameter.grad)
        exchange_sparse(self.job, self.sparse, self._weight, combined_weight)

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._late.clear()
        self._open = self._died = False
        self._left_over = []
        self._buffers_saved = self._passed_forward = False
        self._part = Part.WORKING
        self.loop.round_ended()
        self.rounds += 1
        self._sequence += len(self.buckets) * self._numbers_per_bucket

    # -- rounds without gradients -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Close a round that backward has left open: it ended in an exception, for otherwise its end would have come."""
        if self._open or self._task != NO_TASK:
            self._task = NO_TASK
            self._late.clear()
            self._drop_gradients()
            self._finish_round(Part.FAILED)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to use the gradients that are there."""
        if self.engaged:
            if _current_task() != NO_TASK:
                raise misuse.step_within_backward(optimizer, self.name)
            self.flush()
            if self.loop.backwards:
                if self._has_gradients(optimizer):
                    raise misuse.step_without_round(optimizer, self.name, len(self.loop.backwards))
            elif self.loop.is_second_step(optimizer):
                self._warn_of_own_gradients(optimizer)
            if not self._looked:
                self._notice_late_changes()
            self._looked = False
            self.loop.look_for_scaler()
        self._unused_mean = False

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a step would use gradients of this model. Zeros are as good as none: the same on all workers."""
        return any(_is_nonzero(parameter.grad) for parameter in self._stepped_by(optimizer) if parameter.grad is not None)

    def _stepped_by(self, optimizer: Optimizer) -> Iterator[Tensor]:
        return (parameter for group in optimizer.param_groups for parameter in group["params"] if self.combines(parameter))

    def _warn_of_own_gradients(self, optimizer: Optimizer) -> None:
        """There was no round since this optimizer's last step. What it uses now was put into p.grad by the program itself."""
        if self._warned or self.joining or self.job.world_size == 1:
            return
        own = (p.grad for p in self._stepped_by(optimizer) if p in self.place and not self._holds_mean(p))
        if any(gradient is not None and _is_nonzero(gradient) for gradient in own):
            self._warned = True
            log.warning("rank %d: %s", self.job.rank, misuse.own_gradients(optimizer, self.name))

    def synchronize(self) -> None:
        """Combine now what backward passes under no_sync have accumulated, if anybody has anything. On all workers.

        A worker that has nothing takes part with weight 0: the mean is over those that have something."""
        if not self.engaged:
            return
        if not self.synchronising:
            raise misuse.synchronize_in_no_sync(self.name)
        self.flush()
        if not self._anybody_has_accumulated():
            return
        if self.loop.backwards:
            self._finish_round(Part.WORKING)
        else:
            self._drop_gradients()
            with self.job.weighing(0.0):
                self._finish_round(Part.WORKING)
        if not self.joining:
            self._make_up_for_forward()

    def _anybody_has_accumulated(self) -> bool:
        has, on_mean = bool(self.loop.backwards), False
        if has and self._unused_mean:
            on_mean = any(self._holds_mean(parameter) for _, parameter in self.dense)
        everybody = [[has, on_mean]]
        if self.job.world_size > 1 and not self.joining:  # under join the others may have run out, and do not come here
            everybody = self.job.gather_object([has, on_mean])
        for rank, (_, theirs) in enumerate(everybody):
            if theirs:
                raise misuse.synchronize_over_mean(self.strategy.compress, rank)
        return any(theirs for theirs, _ in everybody)

    def _give_up(self) -> None:
        """Some worker's backward failed: nobody has a combined gradient. Those whose own did not fail get to know."""
        self._drop_gradients()
        ranks = [rank for rank, failed in enumerate(self.job.gather_object(self._part is Part.FAILED)) if failed]
        if self._part is Part.WORKING:
            raise BackwardFailed(ranks)

    def _drop_gradients(self) -> None:
        for _, parameter in (*self.dense, *self.sparse):
            parameter.grad = None

    def shadow_round(self) -> bool:
        """Take part in one round with nothing to give; says whether anybody is still working."""
        self._drop_gradients()
        return self._finish_round(Part.ABSENT).present > 0.0

    # -- for the user -------------------------------------------------------------------------------------------------

    @contextmanager
    def not_synchronising(self) -> Iterator[None]:
        before, self.synchronising = self.synchronising, False
        try:
            yield
        finally:
            self.synchronising = before

    def _check_alone(self) -> None:
        """In a job of one nothing is combined, but what was asked to be checked is."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._gradient_hooks[parameter] = when_accumulated(parameter, self._look_alone, name, orphan=self._orphan)

    def _look_alone(self, name: str, parameter: Tensor) -> None:
        if self._finite is not None and parameter.grad is not None:
            self._finite.look(name, parameter.grad)
            self._finite.conclude(self.job, [parameter.grad])


def _is_nonzero(gradient: Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool((values != 0).any())


def _weigh(gradient: Tensor, weight: float) -> None:
    if weight == 0.0:
        gradient.zero_()  # not times 0: the mean over an empty batch is NaN
    elif weight != 1.0:
        gradient.mul_(weight)


def _digest(buckets: Sequence[Bucket], sparse: Sequence[tuple[str, Tensor]]) -> int:
    """Of who sits where: workers with different layouts must not add one's gradients to another's."""
    places = [f"{bucket.number} {name} {view.shape} {view.stride()}" for bucket in buckets for name, view in bucket.named_views]
    return zlib.crc32("\n".join([*places, *(name for name, _ in sparse)]).encode())


def _current_task() -> int:
    """The number of the backward that runs in this thread, or NO_TASK."""
    return int(torch._C._current_graph_task_id())
