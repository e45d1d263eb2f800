"""A model in stages, as a training loop sees it on one worker. Made by `stretto.pipeline`.

    for x, y in loader:
        optimizer.zero_grad()
        loss = pipeline.forward_backward(x, y, loss_fn)     # in the place of loss = loss_fn(model(x), y); loss.backward()
        optimizer.step()

All stages run the same loop over the same batches. The first uses the inputs, the last the targets; the others may be given
None, for how the batch is cut is told by the first. Afterwards `p.grad` of this stage's parameters holds what it would after
the backward of the plain model: the gradient over the whole batch, combined with those of the stage's replicas as its strategy
says, and with those of other stages that hold the same parameter.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from stretto.checkpoint import StrPath
from stretto.clipping import clip_with
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.distributing import find_engine
from stretto.engine.engine import Engine
from stretto.errors import ConfigurationError, StageFailed, StrettoError, WireError
from stretto.job import Job
from stretto.mesh.clipping import total_norm
from stretto.mesh.cutting import cuts_of
from stretto.partition import saving
from stretto.partition.actions import Order, PipelinePlan, StageAction, Work
from stretto.partition.layers import WholeNames
from stretto.partition.letters import LetterSubject, Name
from stretto.partition.microbatches import cut, joined, samples_in, sizes_of
from stretto.partition.schedules import PipelineSchedule
from stretto.partition.stage_model import StageModel
from stretto.partition.stage_work import LossFunction, StageSeat, StageWork
from stretto.partition.ties import Tie
from stretto.partition.walk import StageSpan, check

Around = Callable[[StageAction], AbstractContextManager[None]]


class Pipeline:
    """One worker's place in a pipeline. `module` holds its layers, `stage` is its number, of `stages`; `replica` that of the copy
    of the pipeline that it belongs to, of `replicas`."""

    __public__ = (
        "forward_backward",
        "evaluate",
        "predict",
        "clip_grad_norm_",
        "parameters",
        "save",
        "load",
        "plan",
        "train",
        "eval",
    )

    def __init__(
        self,
        module: StageModel,
        seat: StageSeat,
        schedule: PipelineSchedule,
        microbatches: int,
        ties: Sequence[Tie],
        among_stages: Group,
        among_replicas: Group,
        loss: str,
        everybody: Job,
        whole: WholeNames,
    ) -> None:
        self.module = module
        self.everybody, self.whole = everybody, whole  # all workers of all replicas; names of all stages
        self.schedule = schedule
        self.microbatches = microbatches
        self.stage, self.stages = seat.stage, seat.stages
        self.replica, self.replicas = among_replicas.rank, among_replicas.size
        self.last_spans: tuple[StageSpan, ...] = ()  # what this stage computed in the last call, and when
        self.last_peak = 0  # of how many micro-batches (in each part) it held activations at once
        self._seat = seat
        self._ties = list(ties)
        self._among_stages, self._among_replicas = among_stages, among_replicas
        self._takes_mean = loss == "mean"
        self._calls = 0
        self._plans: dict[int, PipelinePlan] = {}
        if seat.stages > 1:
            clip_with(self, module.parameters())
        if seat.mailbox is not None:
            weakref.finalize(self, seat.mailbox.running.stop).atexit = False

    def __repr__(self) -> str:
        where = f"stage {self.stage} of {self.stages}" + (
            f", replica {self.replica} of {self.replicas}" if self.replicas > 1 else ""
        )
        return f"Pipeline({where}, {self.schedule!r}, microbatches={self.microbatches})"

    @property
    def job(self) -> Job:
        """The replicas of this stage as a job: `Sampler(dataset, job=pipeline.job)` gives each replica of the pipeline its own
        samples, and all its stages the same ones."""
        job: Job = self.module._stretto_job
        return job

    @property
    def is_first(self) -> bool:
        """Whether this stage uses the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage uses the targets."""
        return self.stage == self.stages - 1

    # -- the loop -----------------------------------------------------------------------------------------------------

    def forward_backward(self, inputs: Any = None, targets: Any = None, loss_fn: LossFunction | None = None) -> Tensor:
        """One forward and backward of a batch, on all stages; returns the loss on each of them.

        `loss_fn(output, targets)` is called on the last stage with micro-batches; what it gives for samples is their mean, unless
        the pipeline was made with `loss="sum"`. Gradients are added to what is in `p.grad`.
        """
        engine = find_engine(self.module)
        self._check_replicas(engine)
        work, plan = self._begin("forward_backward", inputs, targets, loss_fn)
        for tie in self._ties:
            tie.put_aside()
        order = plan.orders[self.stage]
        with self._ending(work), torch.enable_grad():
            work.carry_out(order, _nothing if engine is None else _synchronising_once(engine, order))
            if engine is not None and any(action.work is Work.WEIGHTS for action in order):
                work.doing = "the combination of its gradients"
                engine.synchronize()
            work.doing = "the sum of the gradients of parameters that stages share"
            for tie in self._ties:
                tie.add_up()
            return self._loss(work)

    def evaluate(self, inputs: Any = None, targets: Any = None, loss_fn: LossFunction | None = None) -> Tensor:
        """The loss of a batch, without gradients, on all stages. Call `eval()` first if the model is to be in that mode."""
        work, plan = self._begin("evaluate", inputs, targets, loss_fn)
        with self._ending(work), torch.no_grad():
            work.carry_out(_forwards(plan.orders[self.stage]), _nothing)
            return self._loss(work)

    def predict(self, inputs: Any = None) -> Any:
        """What the model returns for a batch, without gradients: on the last stage; on the others None."""
        work, plan = self._begin("predict", inputs, None, None)
        with self._ending(work), torch.no_grad():
            work.carry_out(_forwards(plan.orders[self.stage]), _nothing)
            self._end_call(work)
            return (
                joined([work.returned[number] for number in sorted(work.returned)], "what the last stage returns")
                if self.is_last
                else None
            )

    # -- around it ----------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this stage, for its optimizer."""
        return self.module.parameters()

    def train(self, mode: bool = True) -> Pipeline:
        """Put this stage's layers into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put this stage's layers into evaluation mode."""
        return self.train(False)

    def plan(self, microbatches: int | None = None) -> PipelinePlan:
        """What each stage computes, and in which order, for this number of micro-batches."""
        number = self.microbatches if microbatches is None else microbatches
        if number not in self._plans:
            self._plans[number] = self.schedule.plan(self.stages, number)
            check(self._plans[number], self.stages, number, self.schedule.chunks, repr(self.schedule))
        return self._plans[number]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients of all stages so that their norm, taken together, is at most `max_norm`; returns what it was.

        Call it on all stages, after `forward_backward`. `stretto.clip_grad_norm_(pipeline.parameters(), ...)` is the same.
        """
        return self.clip(list(self.parameters()), max_norm, norm_type, error_if_nonfinite)

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """The same for some of this stage's parameters, and those that the other stages give."""
        if not norm_type > 0:
            raise ConfigurationError(f"norm_type={norm_type!r}: the order of a norm, a number above 0 or float('inf').")
        if (engine := find_engine(self.module)) is not None:
            engine.settle()  # across the barrier gradients may still be on their way
        twice = {parameter for tie in self._ties if not tie.counts_here for parameter in tie.parameters}
        gradients = [p.grad for p in parameters if p.grad is not None]
        ours = [(p, p.grad) for p in parameters if p.grad is not None and p not in twice]
        largest = math.isinf(norm_type)
        power = torch.zeros(1, dtype=torch.float64, device="cpu")
        if ours:
            plain = not any(cuts_of(parameter) for parameter, _ in ours)  # or the workers along a mesh have slices of them
            norm = get_total_norm([each for _, each in ours], norm_type) if plain else total_norm(ours, norm_type)
            power += norm.double().cpu() ** (1 if largest else norm_type)
        label = " of the norms of a pipeline's stages"
        self._among_stages.run(Kind.ALL_REDUCE, power, "butterfly", op="max" if largest else "sum", label=label)
        norm = (power if largest else power ** (1 / norm_type)).squeeze()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"The total norm of order {norm_type} for gradients is {norm}, so it cannot be clipped.")
        factor = min(1.0, max_norm / (float(norm) + 1e-6)) if torch.isfinite(norm) else float(norm * 0 + 1)
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        return norm.to(gradients[0].dtype) if gradients else norm.float()

    def save(self, path: StrPath, optimizer: Optimizer, extra: Any = None) -> None:
        """Write one checkpoint of the whole model and its optimizer: a plain one, for any other number of stages, or for none.

        All workers call it; the first one writes.
        """
        saving.save(self, path, optimizer, extra)

    def load(self, path: StrPath, optimizer: Optimizer) -> Any:
        """Go on from such a checkpoint; returns its `extra`. All workers call it; the first one reads."""
        return saving.load(self, path, optimizer)

    def gathered(self, mine: Any) -> list[Any]:
        """What every stage of this replica gives, by stage: on the first stage; on the others nothing."""
        self._calls += 1
        mailbox = self._seat.mailbox
        if mailbox is None or self.stages == 1:
            return [mine]
        if not self.is_first:
            mailbox.send(self._seat.ranks[0], Name(self._calls, LetterSubject.STATE, self.stage), mine)
            mailbox.flush()
            return []
        others = range(1, self.stages)
        names = {stage: Name(self._calls, LetterSubject.STATE, stage) for stage in others}
        return [mine, *(mailbox.take(names[stage], self._seat.ranks[stage]).tree for stage in others)]

    # -- one call -----------------------------------------------------------------------------------------------------

    def _check_replicas(self, engine: Engine | None) -> None:
        if self.replicas > 1 and engine is None:
            raise ConfigurationError(
                f"forward_backward of a pipeline whose stages have {self.replicas} replicas each, which nothing keeps equal.\n"
                f"Write stretto.distribute(pipeline.module, optimizer, strategy) before the loop."
            )
        if engine is None:
            return
        if engine.loop.scaler is not None:
            raise ConfigurationError(
                "a pipeline with a GradScaler: each stage would find its own infinities, skip its own steps and so go on with "
                "weights of another version than its neighbours.\nTrain in bfloat16 (torch.autocast), which needs no scaler."
            )
        if self._ties and engine.strategy.schedule.cross_barrier:
            raise ConfigurationError(
                f"a pipeline in which stages share parameters, with schedule={engine.strategy.schedule!r}: the sum of their "
                f"gradients over the stages needs these before the step, and here they come after it.\n"
                f"Use a schedule without cross_barrier, or give each stage parameters of its own."
            )
        if self._ties and engine.training.is_in_slices:
            raise ConfigurationError(
                f"a pipeline in which stages share parameters, with shard={engine.strategy.shard!r}: the sum of their gradients "
                f"over the stages needs whole gradients, and here each replica has slices of its own.\n"
                f"Leave shard out, or cut the model such that what shares parameters is in one stage."
            )
        if engine.training.parameters_in_slices and engine.engaged and _has_halves(self.plan()):
            raise ConfigurationError(
                f"{self.schedule!r}, which computes backwards in halves, with shard={engine.strategy.shard!r}: the second half "
                f"begins in the middle of a graph, where nothing tells that the parameters have to be gathered.\n"
                f"Write schedule=OneForwardOneBackward(), or shard=Zero(1) or Zero(2)."
            )

    def _check_loss(self, call: str, loss_fn: object, targets: Any) -> None:
        if self.is_last and loss_fn is None:
            raise ConfigurationError(f"the last stage of a pipeline needs the loss function: pipeline.{call}(x, y, loss_fn).")
        reduction = getattr(loss_fn, "reduction", None)
        if reduction in ("none", "sum") and (reduction == "none" or self._takes_mean):
            raise ConfigurationError(
                f'{type(loss_fn).__name__}(reduction="{reduction}") in a pipeline made with '
                f'loss="{"mean" if self._takes_mean else "sum"}": micro-batches would be added up with the wrong weights.\n'
                f'Write reduction="mean", or reduction="sum" and stretto.pipeline(..., loss="sum").'
            )
        if self._takes_mean and self.microbatches > 1 and (uneven := _counts_unevenly(loss_fn, targets)) is not None:
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            raise ConfigurationError(
                f"{name} with {uneven}: its mean over a micro-batch is not over the number of samples, so "
                f"means of micro-batches would be added up with the wrong weights.\n"
                f'Write reduction="sum" and stretto.pipeline(..., loss="sum"); for the mean, let a function of yours divide '
                f"that sum by what counts in the whole batch."
            )

    def _begin(self, call: str, inputs: Any, targets: Any, loss_fn: LossFunction | None) -> tuple[StageWork, PipelinePlan]:
        """Agree with the other stages on how the batch is cut."""
        self._calls += 1
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        work = StageWork(self._seat, self.module, device, self._calls, doing="the batch")
        with self._ending(work):  # what is refused on one stage is told to all
            if call != "predict":
                self._check_loss(call, loss_fn, targets)
            samples = self._agreed_samples(call, inputs, targets if loss_fn is not None else None)
            sizes = sizes_of(samples, self.microbatches)
            work.share = [size / samples if self._takes_mean else 1.0 for size in sizes]
            if self.is_first:
                work.inputs = cut(inputs, sizes, "inputs")
            if self.is_last and loss_fn is not None:
                work.targets, work.loss_fn = cut(targets, sizes, "targets"), loss_fn
            return work, self.plan(len(sizes))

    def _agreed_samples(self, call: str, inputs: Any, targets: Any) -> int:
        mailbox, name = self._seat.mailbox, Name(self._calls, LetterSubject.BATCH)
        samples = samples_in(inputs, "inputs") if self.is_first else 0
        if self.stages > 1 and mailbox is not None:
            if self.is_first:
                for rank in self._seat.ranks[1:]:
                    mailbox.send(rank, name, [call, samples])
            else:
                theirs, samples = mailbox.take(name, self._seat.ranks[0]).tree
                if theirs != call:
                    raise ConfigurationError(
                        f"stage {self.stage} of a pipeline calls {call} where its first stage calls {theirs}: all stages run the "
                        f"same loop. Make the same calls in the same order on every worker."
                    )
        given = {"inputs": inputs if not self.is_first else None, "targets": targets}
        for what, batch in given.items():
            if batch is not None and (number := samples_in(batch, what)) != samples:
                raise ConfigurationError(
                    f"stage {self.stage} of a pipeline was given {what} of {number} samples, and the first stage "
                    f"inputs of {samples}: all stages take the same batches.\n"
                    f"Use the same sampler and batch size on every stage of a replica."
                )
        if self.is_last and call != "predict" and targets is None:
            raise ConfigurationError(f"the last stage of a pipeline needs the targets: pipeline.{call}(x, y, loss_fn).")
        return samples

    def _end_call(self, work: StageWork) -> None:
        self.last_spans, self.last_peak = tuple(work.spans), work.peak
        if self._seat.mailbox is not None:
            work.doing = "the last of its messages"
            self._seat.mailbox.flush()

    def _loss(self, work: StageWork) -> Tensor:
        """On all stages; the last has sent it when its last forward had ended."""
        self._end_call(work)
        mailbox, name = self._seat.mailbox, Name(self._calls, LetterSubject.LOSS)
        if self.is_last:
            return work.total
        work.doing = "the loss"
        assert mailbox is not None
        letter: Tensor = mailbox.take(name, self._seat.ranks[-1], hops=2 * self.stages).tree
        return letter.to(work.device)

    def _ending(self, work: StageWork) -> _EndsForAll:
        return _EndsForAll(self, work)

    def end(self, error: BaseException, doing: str) -> StrettoError | None:
        """This worker cannot go on, so nobody can. What is to be raised instead of `error`, if anything."""
        for tie in self._ties:
            tie.forget()
        mailbox = self._seat.mailbox
        if mailbox is None:
            return None
        known = mailbox.error
        if known is None and not isinstance(error, WireError):
            rank, reason = self._seat.ranks[self.stage], f"{type(error).__name__}: {error}"
            mailbox.fail(StageFailed(rank, self.stage, doing, reason))
            return None
        mailbox.fail(error if isinstance(error, WireError) else StrettoError(str(error)))
        return mailbox.error if isinstance(error, StrettoError) else None


class _EndsForAll:
    """An exception inside ends the pipeline on all its workers."""

    def __init__(self, pipeline: Pipeline, work: StageWork) -> None:
        self._pipeline, self._work = pipeline, work

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        instead = self._pipeline.end(error, self._work.doing)
        if instead is None:
            error.add_note(f"in stage {self._pipeline.stage} of a pipeline, in {self._work.doing}")
        elif instead is not error:
            raise instead from error


def _counts_unevenly(loss_fn: object, targets: Any) -> str | None:
    """Why not every target counts as much as any other in the mean that a loss gives; None if it does, or is not known not to."""
    if loss_fn in (nn.functional.cross_entropy, nn.functional.nll_loss):
        weight, ignored = None, -100
    elif isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        weight, ignored = loss_fn.weight, loss_fn.ignore_index
    else:
        return None
    if not isinstance(targets, Tensor) or targets.is_floating_point():  # of probabilities the mean is over all samples
        return None
    if weight is not None:
        return "weights of classes"
    return f"targets to ignore ({ignored})" if bool((targets == ignored).any()) else None


def _nothing(action: StageAction) -> AbstractContextManager[None]:
    return nullcontext()


def _synchronising_once(engine: Engine, order: Order) -> Around:
    """The first forward and the last backward are the round that the replicas of a stage share; gradients of the others wait in
    `p.grad` for it. Where backwards are in halves, the caller combines what has been gathered."""
    backwards = [action for action in order if action.work is not Work.FORWARD]
    last = backwards[-1] if backwards[-1].work is Work.BACKWARD else None

    def around(action: StageAction) -> AbstractContextManager[None]:
        return nullcontext() if action in (order[0], last) else engine.not_synchronising()

    return around


def _has_halves(plan: PipelinePlan) -> bool:
    return any(action.work is Work.WEIGHTS for order in plan.orders for action in order)


def _forwards(order: Order) -> Order:
    return tuple(action for action in order if action.work is Work.FORWARD)
