"""Pipelined all-reduce: gradients are averaged in the background while the next steps compute, and each average is applied
`bound` steps late.

    backward k        g_k of this worker leaves, and nobody waits for it
                      p.grad <- mean over workers of g_(k - bound), the same bits on all; None while k <= bound
    step k            w_(k+1) = U(w_k, mean g_(k - bound))

The lateness is fixed. The alternative, to apply whatever has arrived and to wait only for what is `bound` old, needs the workers
to agree at every step on what has arrived everywhere, or replicas would differ: a message and a wait per step, which is what
pipelining is there to avoid. With a fixed lateness nothing has to be agreed on, results do not depend on network speed,
and the wait is the same: a step waits only if an average takes longer than `bound` steps.

    step time   max(compute, communicate)  from bound = 1 on, where Synchronous takes up to  compute + communicate

More than 1 evens out transfers and workers that are slow in turn; it does not make a slow network faster.

Warm-up:    in the first `bound` steps p.grad is None after backward, and an optimizer of torch leaves the weights as they are.
End:        `bound` averages are left. `stretto.synchronize(model)` takes the steps for them (with the optimizers as they are by
            then, and without what the loop does between backward and step, such as clipping), and so do `release` and a new
            `distribute`. The next backward begins with a warm-up again.
Saving:     takes no step. Averages that are under way are part of the state, so training that goes on or is resumed has the same
            bits as if it had never stopped. Loaded with another strategy they are lost, and `load` says so.
Invariant:  every gradient is applied once, in order, with the same step on all workers; replicas stay equal to the bit. The
            staleness of an average, the number of updates between the weights it was computed on and those it is applied to, is
            at most `bound`, and noted in the ledger.
Cost:       bytes as those of Synchronous; memory for bound + 2 sets of gradients instead of one, and two copies of them per step.
Gradients leave at the end of backward: under the following steps they have more time than they would gain.
Codecs:     round k is exchanged by lane k mod (bound + 1), and each lane has residuals and matrices of its own: a round need not
            wait for the residual of another that is under way. Conservation holds in each lane. What a payload leaves out is sent
            bound + 1 rounds later. Codecs with a momentum, or that count rounds, would see only every (bound + 1)-th round, and
            are refused.
Failures:   a backward that fails on one worker becomes known to the others `bound` steps later, when they have stepped without
            it. That cannot be undone: all workers raise, then and at every later use, and have to be started again from a saved
            state.
Reference:  Li et al., "Pipe-SGD: a decentralized pipelined SGD framework for distributed deep net training", NeurIPS 2018, whose
            pipeline of width K = bound + 1 this is. Departs from it: averages reach p.grad, so that clipping and every optimizer
            work as they do with Synchronous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce import compression_state
from stretto.aggregate.all_reduce.bucket import ReducedBucket, layout_digest, make_buckets
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.compress.codec import Compression
from stretto.compress.state import CompressionState
from stretto.compress.warm_up import WarmUp
from stretto.engine.bucket import Bucket
from stretto.engine.finite import FiniteCheck
from stretto.engine.postponed_step import with_gradients
from stretto.engine.stepping import decides_by_loss
from stretto.engine.training import (
    EVERYBODY,
    Named,
    Participation,
    RoundEnd,
    RoundResult,
    Setting,
    TensorsByName,
    TrainingState,
)
from stretto.engine.watch import Watch
from stretto.errors import ConfigurationError, StrettoError
from stretto.job import Job
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.sync.stale_synchronous import StaleSynchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy

LATE: Final = "late "  # of a saved average: "late 0" is the one that is applied next
LANE: Final = "lane "  # of what a lane's compression remembers: "lane 1 residual"


@dataclass(slots=True)
class LateRound:
    """A round that has left and is not applied yet. `seen`: how many averages the weights had that it was computed on."""

    seen: int
    lane: list[ReducedBucket] = field(default_factory=list)  # until it has landed
    means: dict[str, Tensor] = field(default_factory=dict)  # by parameter, once it has; none for one that nobody has used
    names: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the workers that have used each of these parameters
    finite: FiniteCheck | None = None
    failed: bool = False


class PipelinedAllReduce(SynchronousAllReduce):
    """`AllReduce` + `StaleSynchronous` + `Replicated`. The engine fills `buckets`, which never travel; lanes do."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        assert isinstance(strategy.sync, StaleSynchronous)
        self._bound = strategy.sync.bound
        self._asked = f"sync={strategy.sync!r}"
        self._lanes: list[list[ReducedBucket]] = []
        self._late: deque[LateRound] = deque()
        self._begun = 0  # rounds
        self._applied = 0  # averages
        self._failure: StrettoError | None = None
        self._is_loaded = False
        self.no_second_mean, self.state_text = self._asked, f"{strategy.compress!r}, {self._asked}"
        self.no_join = f"{self._asked}: averages would come to workers that have run out of data, who take no step"
        if setting.scaler is not None and setting.scaler.is_enabled():
            raise self._no_scaler()

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        super().check_strategy(strategy)
        asked = f"aggregate={strategy.aggregate!r}, sync={strategy.sync!r}"
        if getattr(strategy.aggregate, "algorithm", "") == "native":
            raise ConfigurationError(
                f"{asked}: the collectives of torch run while the caller waits, so nothing can arrive later.\n"
                f"Write aggregate=AllReduce(), or sync=Synchronous()."
            )
        if not isinstance(strategy.schedule, AfterBackward | WaitFree | Buckets):
            raise ConfigurationError(
                f"{asked} with schedule={strategy.schedule!r}: all gradients leave when backward has ended, and are read `bound` "
                f"steps later, so there is no order among them to be planned.\nLeave schedule= out, or write "
                f"schedule=Buckets(bytes=...) for other sizes."
            )
        if (reason := _counts_rounds(strategy.compress)) is not None:
            raise ConfigurationError(
                f"{asked} with compress={strategy.compress!r}: {reason}, and with rounds under way side by side each of its "
                f"lanes sees only some of them.\nWrite a codec without it, such as ErrorFeedback(Sign()), or sync=Synchronous()."
            )

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        asked = f"sync={strategy.sync!r}"
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ConfigurationError(
                    f"{asked}: {name or type(module).__name__} has sparse gradients, which are combined while everybody waits.\n"
                    f"Write sparse=False, or sync=Synchronous()."
                )
        for optimizer in optimizers:
            if decides_by_loss(optimizer):
                raise ConfigurationError(
                    f"{asked} with {type(optimizer).__name__}: it decides by several losses and gradients of the weights as they "
                    f"are, and here gradients come late.\nUse an optimizer that steps by one gradient, or sync=Synchronous()."
                )

    # -- parameters ---------------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:  # type: ignore[override]
        before = self._remembers()  # which also waits for what is under way
        for late in self._late:
            late.means = {name: mean.detach().clone() for name, mean in late.means.items()}  # their lane's memory goes
        plan, apart = self._plan(dense), self._closing_notes_all
        sets = [make_buckets(dense, plan, self._strategy.compress, apart=apart) for _ in range(self._bound + 2)]
        self.buckets, self._lanes = sets[0], sets[1:]
        for bucket in self.buckets:
            bucket.early = False
            bucket.state = None
        self._restore_lanes(before)
        self._sparse = sparse
        self._bucket_of = {}
        self._label = f" for gradients of {self._setting.name}, layout {layout_digest(self.buckets, sparse):08x}"
        return self.buckets

    def before_forward(self, buffers: Watch | None, *, saved: bool) -> None:
        self._check()
        super().before_forward(buffers, saved=saved)

    def round_begins(self) -> None:
        self._check()

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        self._check()
        scaler = self._setting.loop.scaler
        if scaler is not None and scaler.is_enabled():
            raise self._no_scaler()
        return EVERYBODY

    def after_step(self, optimizer: Optimizer) -> None:
        pass

    def _no_scaler(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._asked} with a GradScaler: it divides by today's scale what was computed under an older one, and finds no "
            f"gradients in the first steps.\nTrain in bfloat16, which needs no scaler; or write sync=Synchronous()."
        )

    # -- a round ------------------------------------------------------------------------------------------------------

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        try:
            self._leave(end)
            if end.participation is Participation.FAILED:
                self._failure = _failed(f"a backward of {self._setting.name} ended in an exception on this worker")
            if self._failure is not None or len(self._late) <= self._bound:
                self._drop_gradients()
                return RoundResult(combined=self._failure is None)
            return self._hand_over(self._late.popleft())
        except BaseException:
            self._drop_gradients()
            raise
        finally:
            self._round += 1

    def _leave(self, end: RoundEnd) -> None:
        """This worker's gradients are copied to the next lane, which begins its exchange."""
        lane = self._lanes[self._begun % len(self._lanes)]
        self._finite = FiniteCheck() if self._setting.check_finite else None
        for front, bucket in zip(self.buckets, lane, strict=True):
            bucket.gradients.copy_(front.gradients)
            bucket.used = list(front.used)
        for bucket in lane:
            self._send(bucket, end.participation, late=False)
        self._late.append(LateRound(self._applied, lane, finite=self._finite))
        self._begun += 1
        self._is_loaded = False
        self._sequence += len(lane) * self._numbers_per_bucket

    def _draw_of(self, state: CompressionState) -> int:
        return self._begun

    def _hand_over(self, late: LateRound) -> RoundResult:
        """The average of an earlier round becomes the gradients."""
        self._land(late)
        if late.failed:
            self._failure = _failed(f"a backward of {self._setting.name} ended in an exception on another worker")
            raise self._failure
        for bucket in self.buckets:
            found = [late.means.get(name) for name in bucket.names]
            views = [view for view, mean in zip(bucket.views, found, strict=True) if mean is not None]
            if views:
                torch._foreach_copy_(views, [mean for mean in found if mean is not None])
            bucket.hand_out([mean is not None for mean in found])
        self._count(late)
        if late.finite is not None:
            late.finite.conclude(self._job, late.means.values())
        assert self._planner is not None
        arrange_anew = self._planner.round_ended(late.names, late.shares)
        lowest = min(late.shares, default=1.0)
        some_unused = lowest < 1.0 - 0.5 / self._job.world_size or len(late.means) < len(late.names)
        return RoundResult(combined=True, some_unused=some_unused, final=True, arrange_anew=arrange_anew)

    def _count(self, late: LateRound) -> None:
        self._job.ledger.count_round(staleness=self._applied - late.seen)
        self._applied += 1

    def _land(self, late: LateRound) -> None:
        """Wait for a round, and take the averages out of its lane."""
        if not late.lane:
            return
        lane = late.lane
        self._wait(lane)
        closing, closing_shares = lane[-1].read()
        late.failed = closing.failed > 0
        notes, shares = self._notes_of_buckets(lane, closing, closing_shares)
        for bucket, note, used in zip(lane, notes, shares, strict=True):
            flags = [share > 0 for share in used]
            if late.failed:
                self._end_exchange(bucket, good=False)
            else:
                self._finish(bucket, note, closing, flags)
                members = zip(bucket.names, bucket.views, flags, strict=True)
                late.means |= {name: view for name, view, somewhere in members if somewhere}
            late.names += bucket.names
            late.shares += used
            bucket.turn = bucket.exchange = None
        late.lane = []

    # -- what is left -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self._check()
        for late in [*self._late]:
            self._land(late)
            if late.failed:
                self._failure = _failed(f"a backward of {self._setting.name} ended in an exception on another worker")
                raise self._failure
            if late.finite is not None:
                late.finite.conclude_alone(self._job.rank, late.means.values(), "an average that was still to be applied")
            parameters: dict[str, Tensor] = dict(self._setting.model.named_parameters())
            gradients = {parameters[name]: mean for name, mean in late.means.items() if name in parameters}
            for optimizer in self._setting.loop.optimizers:
                members = [[p for p in group["params"] if p in gradients] for group in optimizer.param_groups]
                groups = [{**g, "params": mine} for g, mine in zip(optimizer.param_groups, members, strict=True) if mine]
                if groups:
                    with_gradients(optimizer, groups, gradients)
            self._count(late)
            self._late.popleft()

    def before_release(self) -> None:
        self.finish()

    def begin_anew(self) -> None:
        """Weights were loaded: averages of before belong to others."""
        if not self._is_loaded:
            self._forget()
        self._is_loaded = False

    def _forget(self) -> None:
        """Memory is not free before everything under way has arrived or failed."""
        for late in self._late:
            with suppress(Exception):
                self._wait(late.lane)
            for bucket in late.lane:
                self._end_exchange(bucket, good=False)
                bucket.turn = bucket.exchange = None
        self._late.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- what is remembered -------------------------------------------------------------------------------------------

    def state(self) -> TrainingState:
        self._check()
        remembered = self._remembers()
        for number, late in enumerate(self._late):
            for name, mean in late.means.items():
                remembered.shared.setdefault(name, {})[f"{LATE}{number}"] = mean.detach().clone()
        return remembered

    def _remembers(self) -> TrainingState:
        """What compressions do. Averages that are late have landed when it returns."""
        for late in self._late:
            self._land(late)
        own: TensorsByName = {name: dict(kinds) for name, kinds in self._remembered[0].items()}
        shared: TensorsByName = {name: dict(kinds) for name, kinds in self._remembered[1].items()}
        for number, lane in enumerate(self._lanes):
            for whole, part in zip((own, shared), compression_state.export(lane), strict=True):
                for name, kinds in part.items():
                    whole.setdefault(name, {}).update({f"{LANE}{number} {kind}": value for kind, value in kinds.items()})
        return TrainingState(self._begun, own, shared)

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        for bucket in self.buckets:
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                for kind, value in saved.get(name, {}).items():
                    if kind.startswith(LATE) and (not isinstance(value, Tensor) or value.shape != parameter.shape):
                        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                        return f"{kind} of {name} is {shape}, the parameter {tuple(parameter.shape)}"
        answers = [*compression_state.compressed_in(self.buckets)]
        problems = (compression_state.check(_of_lane(saved, number), answers) for number in range(len(self._lanes)))
        return next((problem for problem in problems if problem is not None), None)

    def load_state(self, state: TrainingState) -> None:
        self._forget()
        for lane in self._lanes:
            for bucket in lane:
                bucket.forget()
        self._restore(state)
        self._is_loaded = True

    def _restore(self, state: TrainingState) -> None:
        """Averages are found by parameter name, so they fit other buckets too."""
        self._restore_lanes(state)
        here = {name: view for bucket in self.buckets for name, view in bucket.named_views}
        late: dict[int, dict[str, Tensor]] = {}
        for name, kinds in state.shared.items():
            for kind, value in kinds.items():
                if kind.startswith(LATE):
                    means = late.setdefault(int(kind.removeprefix(LATE)), {})
                    if name in here:
                        means[name] = value.to(device=here[name].device, dtype=here[name].dtype, copy=True)
        count = max(late, default=-1) + 1
        self._applied = self._begun - count
        first = self._applied - self._bound  # below 0 for rounds of the warm-up, which had seen no average
        self._late = deque(LateRound(max(0, first + number), means=late.get(number, {})) for number in range(count))

    def _restore_lanes(self, state: TrainingState) -> None:
        """The lanes must be fresh."""
        self._begun = state.rounds
        for number, lane in enumerate(self._lanes):
            rounds = (self._begun - number + self._bound) // (self._bound + 1)  # that this lane has had
            mine = TrainingState(rounds, _of_lane(state.own, number), _of_lane(state.shared, number))
            compression_state.restore(lane, mine, *self._combiners)
        here = {name for bucket in self.buckets for name in bucket.names}
        own, shared = (
            {
                name: {kind: value for kind, value in kinds.items() if kind.startswith(LANE)}
                for name, kinds in part.items()
                if name not in here
            }
            for part in (state.own, state.shared)
        )
        self._remembered = (own, shared)

    def shared_out(self, everybody: Sequence[TensorsByName]) -> TensorsByName:
        out: TensorsByName = {}
        for number in range(len(self._lanes)):
            mean = compression_state.mean_of([_of_lane(own, number) for own in everybody], self._job.world_size)
            for name, kinds in mean.items():
                out.setdefault(name, {}).update({f"{LANE}{number} {kind}": value for kind, value in kinds.items()})
        return out


def _of_lane(everything: Mapping[str, Mapping[str, Any]], number: int) -> dict[str, dict[str, Any]]:
    """What one lane's compression remembers, under the names that it gave it."""
    prefix = f"{LANE}{number} "
    return {
        name: {kind.removeprefix(prefix): value for kind, value in kinds.items() if kind.startswith(prefix)}
        for name, kinds in everything.items()
    }


def _counts_rounds(compress: Compression) -> str | None:
    """Why it has to see every round, in words, if so; also of a compression within."""
    if compress.optimizer_hint is not None:
        return "it keeps a momentum from round to round"
    if isinstance(compress, WarmUp):
        return "WarmUp counts rounds"
    inside: list[Any] = [getattr(compress, each.name) for each in fields(compress)] if is_dataclass(compress) else []
    parts = [part for value in inside for part in (value if isinstance(value, tuple) else (value,))]
    parts = [part for value in parts for part in (value if isinstance(value, tuple) else (value,))]
    reasons = (_counts_rounds(part) for part in parts if isinstance(part, Compression))
    return next((reason for reason in reasons if reason is not None), None)


def _failed(what: str) -> StrettoError:
    return StrettoError(
        f"{what}. With averages that are applied late the others have stepped since, and cannot take that back.\n"
        f"Start the workers again and begin from a saved state (stretto.load)."
    )
