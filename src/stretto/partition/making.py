"""stretto.pipeline(): a model cut into stages, one for each worker or for each group of replicas."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from stretto.aggregate.hierarchy.group_job import GroupJob
from stretto.api import current_job
from stretto.collectives import calls
from stretto.collectives.group import Among, Group
from stretto.errors import ConfigurationError, RankMismatch
from stretto.job import Job
from stretto.partition import cutting
from stretto.partition.actions import Work, place_of
from stretto.partition.layers import Layer, WholeNames, check_composition, layers_of
from stretto.partition.mailbox import Mailbox
from stretto.partition.measuring import measure
from stretto.partition.microbatches import cut as cut_batch
from stretto.partition.microbatches import samples_in, sizes_of
from stretto.partition.pipelining import Pipeline
from stretto.partition.schedules import READER, OneForwardOneBackward, PipelineSchedule
from stretto.partition.seating import Seating, seat
from stretto.partition.stage_model import StageModel
from stretto.partition.stage_work import StageSeat
from stretto.partition.ties import Tie, check_buffers, tied
from stretto.partition.walk import check

log = logging.getLogger("stretto")
LossOver = Literal["mean", "sum"]


def pipeline(
    model: nn.Module,
    stages: int,
    microbatches: int,
    schedule: PipelineSchedule | str | None = None,
    *,
    cut: Sequence[str] | None = None,
    sample: Any = None,
    layers: Sequence[str] | None = None,
    recompute: bool = False,
    loss: LossOver = "mean",
    group: Among = "world",
) -> Pipeline:
    """Cut `model` into `stages` stages that train it together, each batch in `microbatches` micro-batches. All workers call it.

    With more workers than stages, each stage has `workers / stages` replicas, which train data-parallel: give
    `stretto.distribute` this worker's part, `pipeline.module`. `schedule` says who computes what when: `GPipe()`,
    `OneForwardOneBackward()` (taken if left out), `Interleaved(chunks)`, `ZeroBubble()`, the text of one, or a
    `PipelineSchedule` of yours.

    Where to cut: `cut` names the layers with which the second stage and those after it begin; without it the slowest stage is
    made as fast as can be, by the time that each layer takes on a micro-batch of `sample`, which the first worker measures, or,
    without a sample, by numbers of parameters. Layers are the children of an `nn.Sequential`; for any other model `layers`
    names modules whose composition is its forward, which is checked with `sample`.

    `recompute`: keep only what comes into a stage, and compute the rest anew in backward. `loss`: whether the loss function gives
    the "mean" over the samples that it is given or their "sum". `group`: the workers that take part, if not all.

    Build the model with the same seed on all workers, or load a checkpoint: each keeps its part of its own. On a GPU, build it on
    the CPU and move `pipeline.module`.
    """
    job = current_job()
    among = job.world if group == "world" else group
    if not isinstance(among, Group):
        raise ConfigurationError(
            f"pipeline(group={group!r}): this is no group. Write group=stretto.group(ranks), or leave it out."
        )
    made, problem = None, None
    try:
        schedule = READER.read(schedule) if isinstance(schedule, str) else schedule or OneForwardOneBackward()
        _check(schedule, microbatches, loss, model, recompute)
        seating = seat(among, stages)
        all_layers = layers_of(model, layers)
        _check_sample(model, all_layers, layers, sample)
        check(schedule.plan(stages, microbatches), stages, microbatches, schedule.chunks, repr(schedule))
        bounds = _bounds(among, all_layers, stages, schedule.chunks, cut, sample, microbatches)
        made = seating, all_layers, bounds
    except ConfigurationError as refused:
        problem = refused
    _admit(among, problem)
    assert made is not None and isinstance(schedule, PipelineSchedule)
    seating, all_layers, bounds = made
    if bounds is None:
        bounds = _agreed_bounds(among, all_layers, stages, schedule.chunks, sample, microbatches)
    names = [layer.name for layer in all_layers]
    _agree(among, [repr(schedule), microbatches, recompute, loss, bounds, names])
    pieces = [all_layers[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    whole = WholeNames.of(model)
    return _assemble(job, among, seating, schedule, microbatches, pieces, whole, recompute=recompute, loss=loss)


def _check(schedule: object, microbatches: object, loss: object, model: object, recompute: bool) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"pipeline({type(model).__name__}, ...): the first argument is the nn.Module to cut.")
    if isinstance(schedule, type) or not isinstance(schedule, PipelineSchedule):
        hint = f" Did you mean {schedule.__name__}(), with parentheses?" if isinstance(schedule, type) else ""
        raise ConfigurationError(
            f"pipeline(schedule={schedule!r}): not a schedule of pipelines.{hint}\n"
            f"Write GPipe(), OneForwardOneBackward(), Interleaved(chunks=2) or ZeroBubble()."
        )
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ConfigurationError(
            f"microbatches={microbatches!r}: into how many micro-batches a batch is cut, a whole number from 1 on. "
            f"Four times the number of stages leave little of the bubble."
        )
    if loss not in ("mean", "sum"):
        raise ConfigurationError(f'loss={loss!r}: write "mean" or "sum", whichever the loss function gives for its samples.')
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms and recompute:
        raise ConfigurationError(
            f"recompute=True with a BatchNorm ({norms[0]!r}): its running statistics would be updated twice for each "
            f"micro-batch, in forward and again when that is recomputed.\nLeave recompute out, or use GroupNorm or LayerNorm."
        )
    plan = schedule.plan(2, 2)
    if recompute and any(action.work is Work.INPUTS for order in plan.orders for action in order):
        raise ConfigurationError(
            f"recompute=True with schedule={schedule!r}: a forward would be recomputed for both halves of each backward.\n"
            f"Use OneForwardOneBackward() with recompute, or leave recompute out."
        )


def _check_sample(model: nn.Module, all_layers: Sequence[Layer], named: Sequence[str] | None, sample: Any) -> None:
    if named is None:
        return
    if sample is None:
        raise ConfigurationError(
            f"layers={list(named)} without a sample: whether these, one after the other, are the forward of this "
            f"{type(model).__name__} cannot be seen without calling it.\nWrite sample=a_batch, of inputs as the model takes them."
        )
    check_composition(model, all_layers, sample)


def _bounds(
    among: Group, layers: Sequence[Layer], stages: int, chunks: int, cut: Sequence[str] | None, sample: Any, microbatches: int
) -> list[int] | None:
    """Where pieces begin; None: the first worker has to measure."""
    pieces = stages * chunks
    if sum(layer.has_parameters for layer in layers) < pieces:
        raise cutting.too_few(layers, stages, chunks)
    if cut is not None:
        if isinstance(cut, str) or len(cut) != pieces - 1:
            raise ConfigurationError(
                f"cut={cut!r}: {pieces - 1} names are needed, of the layers with which pieces 2 to {pieces} of the model begin "
                f"({stages} stages of {chunks} {'part' if chunks == 1 else 'parts'} each)."
            )
        return cutting.by_name(layers, cut)
    if sample is not None and pieces > 1:
        samples_in(sample, "the sample")
        return None
    sizes = [float(sum(p.numel() for p in layer.module.parameters())) for layer in layers]
    bounds = cutting.balanced(sizes, [layer.has_parameters for layer in layers], pieces)
    assert bounds is not None
    return bounds


def _agreed_bounds(among: Group, layers: Sequence[Layer], stages: int, chunks: int, sample: Any, microbatches: int) -> list[int]:
    """By what the first worker measures. The others wait for it."""
    bounds: list[int] | None = None
    failure: Exception | None = None
    if among.rank == 0:
        try:
            sizes = sizes_of(samples_in(sample, "the sample"), microbatches)
            seconds = measure(layers, cut_batch(sample, sizes, "the sample")[0])
            bounds = cutting.balanced(seconds, [layer.has_parameters for layer in layers], stages * chunks)
        except Exception as error:
            failure = error
    found = calls.gather_object(among, bounds)[0] if among.size > 1 else bounds
    if failure is not None:
        raise failure
    if found is None:
        raise ConfigurationError(
            f"the layers could not be measured: rank {among.ranks[0]} failed in one of them with the sample. See what it raised."
        )
    return [int(each) for each in found]


def _admit(among: Group, problem: ConfigurationError | None) -> None:
    """Raise on every worker if any has a problem."""
    told = None if problem is None else str(problem)
    problems = calls.gather_object(among, told) if among.size > 1 else [told]
    if problem is not None:
        raise problem
    for place, theirs in enumerate(problems):
        if theirs is not None:
            raise ConfigurationError(
                f"pipeline() was refused on rank {among.ranks[place]}, so nobody can begin. There it said:\n{theirs}"
            )


def _agree(among: Group, mine: list[Any]) -> None:
    if among.size == 1:
        return
    everybody = calls.gather_object(among, mine)
    for place, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise RankMismatch(
                f"pipeline(): ranks {among.ranks[0]} and {among.ranks[place]} differ, so nothing was begun:\n"
                f"  rank {among.ranks[0]}: {everybody[0]}\n  rank {among.ranks[place]}: {theirs}\n"
                f"Build the same model and call pipeline() with the same arguments on every rank."
            )


def _assemble(
    job: Job,
    among: Group,
    seating: Seating,
    schedule: PipelineSchedule,
    microbatches: int,
    pieces: Sequence[Sequence[Layer]],
    whole: WholeNames,
    *,
    recompute: bool,
    loss: str,
) -> Pipeline:
    by_stage = [[] for _ in range(seating.stages)]  # type: list[list[Sequence[Layer]]]
    for number, piece in enumerate(pieces):
        by_stage[place_of(number, seating.stages)[0]].append(piece)
    layers_of_stages = [[layer for part in parts for layer in part] for parts in by_stage]
    check_buffers(layers_of_stages)
    replica, stage = (_part_of(among, places) for places in (seating.of_replica(), seating.of_stage()))
    mailbox = _mailbox(job, among)
    module = StageModel(by_stage[seating.stage], recompute=recompute)
    module._stretto_job = GroupJob(job, stage)
    ties = []
    for stages, parameters in tied(layers_of_stages).items():
        if seating.stage in stages:
            ties.append(Tie(_part_of(replica, list(stages)), parameters))
            ties[-1].make_equal()
    seat_here = StageSeat(seating.stage, schedule.chunks, replica.ranks, mailbox, job.tracer)
    everybody = GroupJob(job, among)
    return Pipeline(module, seat_here, schedule, microbatches, ties, replica, stage, loss, everybody, whole)


def _part_of(group: Group, places: list[int]) -> Group:
    return group if len(places) == group.size else group.sub(places)


def _mailbox(job: Job, among: Group) -> Mailbox | None:
    channel = among.new_channel()
    if among.size == 1:
        return None
    communication, wire = among.endpoint.communication, job.wire
    assert communication is not None and wire is not None
    return Mailbox(communication.loop, wire, channel, among.ranks, job.timeouts)
