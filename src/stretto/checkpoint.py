"""save() and load(): one file holds what all workers share once, and what each has of its own by rank.

    {"model", "optimizer"}   their state_dicts, from rank 0 (replicas are equal)
    {"extra"}                whatever rank 0 gave: step number, scheduler and scaler state, ...
    {"stretto"}              format, versions, world_size, workers_per_host, strategy, optimizer (its class)
        buckets              the names of the parameters in each bucket
        choices              what `auto` chose (rank 0 decides)
        sampler              the place in the data, good for any number of workers
        compress             the compression, its number of rounds, and what it remembers that is the same on all workers
        ranks[r]             of worker r: rounds, weight, samples consumed, random generators, buffers (where they are local),
                             what its compression remembers of its own: residuals, momenta, by parameter; and where each worker
                             trains a model of its own, that model and its optimizer's state: "model" is their mean then

Both are collective. Only rank 0 touches the file: it need not be visible to other hosts. In load its bytes are
broadcast piece by piece, and every worker checks the sha256 of what it got. It keeps them in memory that it can map, so
that loading takes as much memory as the file is long, once, and that of the optimizer's new state. Nothing but tensors
and plain values is ever unpickled (`weights_only=True`).

Invariant: a failure on any rank raises `CheckpointError` on all ranks. Each part runs with its errors caught, then
all exchange how it went, so nobody waits for a rank that gave up. load() changes nothing before all ranks have
checked everything.

Save, kill, resume with as many workers gives the same bits as never having stopped; with another number, `Resumed`
says what is lost.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import stretto
from stretto import checkpoint_file, from_snapshot, own_models, plain_values, random_state
from stretto.checkpoint_differences import difference as first_difference
from stretto.checkpoint_differences import names_of, optimizer_difference, saved_optimizers
from stretto.distributing import as_tuple, engine_of
from stretto.engine.engine import Engine
from stretto.engine.state import kinds, load_exactly, put_together, take_apart
from stretto.engine.training import TrainingState
from stretto.errors import CheckpointError, ConfigurationError
from stretto.from_snapshot import FromSnapshot
from stretto.job import Job
from stretto.launching.peers import ranks_text
from stretto.mesh import checkpoints as in_parts
from stretto.plan.choose import Choices
from stretto.sampler import Sampler
from stretto.shared_file import all_succeed, received

FORMAT = 2
END_OF_ARCHIVE = b"\0\0"  # the length of a comment that is not there
StrPath = str | os.PathLike[str]
T = TypeVar("T")

log = logging.getLogger("stretto")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `load` found: `extra` as it was saved, by how many workers, what goes on as before and what does not."""

    extra: Any
    world_size: int
    carried: tuple[str, ...]
    lost: tuple[str, ...]


def save(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    sampler: Sampler | None = None,
    extra: Any = None,
    job: Job | None = None,
) -> None:
    """Write a checkpoint for `load`, which plain `torch.load(path, weights_only=True)` opens too. All workers call it.

    Rank 0 writes to its `path`, with its `extra`. The file is replaced as a whole when everything is on disk; on any
    failure the old one stays, and all workers raise `CheckpointError`. Call it after `optimizer.step()`: gradients
    are not saved.
    """
    engine = _engine(model, optimizer, job)
    if engine.loop.others and engine.job.rank == 0:
        log.warning(
            "save(%r): %s has stepped this model's parameters too, and its state is not saved. Give all of them to distribute() "
            "and save(): (optimizer, other).", str(path), names_of(list(engine.loop.others)),
        )  # fmt: skip

    def look() -> dict[str, Any]:
        if engine.job.rank == 0:
            plain_values.check(extra, "extra")
        for each in engine.loop.optimizers:
            in_parts.check_optimizer(each)
        if engine.training.replicas_differ:
            own_models.check(engine.loop.optimizers)
        return _of_this_worker(engine, sampler)

    job = in_parts.job_of_all(engine.model, engine.job)
    mine = all_succeed(job, f"save({str(path)!r})", look)
    everybody = job.gather_object(mine)
    _check_loops(str(path), [worker.pop("loop") for worker in everybody])
    all_succeed(job, f"save({str(path)!r})", engine.training.before_save)

    with engine.training.result_shown():
        for rank, tensors in enumerate(_collect_tensors(engine, job)):
            everybody[rank] |= tensors
        whole, optimizers = _whole_states(engine)

        def write() -> None:
            if job.rank == 0:
                content = {
                    "model": whole,
                    "optimizer": _one_or_all(optimizers),
                    "extra": extra,
                    "stretto": _stretto_entry(engine, sampler, everybody),
                }
                checkpoint_file.write(Path(path), content)

        all_succeed(job, f"save({str(path)!r})", write)


def load(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    sampler: Sampler | None = None,
    job: Job | None = None,
) -> Resumed:
    """Take up training where `save` was called; also with another number of workers. All workers call it, after `distribute`.

    `path` may also be a snapshot that `ParameterServer(snapshots=...)` has taken, or the folder with them, for the newest whole
    one: `Resumed.extra` is then {"step": the steps that all workers had taken}.

    Rank 0 reads its `path`; the others need not see the file. A missing, damaged or unfitting checkpoint raises
    `CheckpointError` on all workers, and nothing has been changed then.
    """
    engine, what = _engine(model, optimizer, job), f"load({str(path)!r})"
    for each in sorted(engine.job.engines, key=lambda each: each.name):  # what `auto` chose is loaded for all models of the job
        each.flush()
        each.settle_or_forget()
    job = in_parts.job_of_all(engine.model, engine.job)
    snapshot = all_succeed(job, what, lambda: from_snapshot.find(Path(path), engine) if job.rank == 0 else None)
    if job.gather_object(snapshot is not None)[0]:
        resumed = _of_snapshot(from_snapshot.load(engine, snapshot, what), sampler)
    else:
        with received(job, Path(path), what, checkpoint_file.seal_of, END_OF_ARCHIVE) as copy:
            content = all_succeed(job, what, lambda: _checked(copy, engine, sampler))
        resumed = all_succeed(job, what, lambda: _apply(content, engine, sampler))
    engine.training.begin_anew()
    engine.choices_loaded()
    if job.rank == 0:
        log.info("%s: saved by %d workers; carried over: %s", what, resumed.world_size, ", ".join(resumed.carried))
        for each in resumed.lost:
            log.warning("%s: not carried over: %s", what, each)
    return resumed


def _engine(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], job: Job | None) -> Engine:
    engine = engine_of(model)
    given, known = as_tuple(optimizer), engine.loop.optimizers
    if len(given) != len(known) or any(one is not other for one, other in zip(given, known, strict=True)):
        raise ConfigurationError(
            f"{names_of(given)}: the model was distributed with {names_of(known)}, and not with the very same.\n"
            f"Give model and optimizer as they came from stretto.distribute(model, optimizer), several in the same order. A new "
            f"optimizer is made known by distribute(model, new_optimizer)."
        )
    if job is not None and job is not engine.job:
        raise ConfigurationError("job=... is another job than the one the model was distributed in. Leave it out.")
    if any(other.joining for other in engine.job.engines):
        raise ConfigurationError(
            "save or load inside join: a worker that has run out of data does not get here, and the others would wait for it.\n"
            "Call it after the join, or give all workers as many batches (Sampler(..., drop_last=True)) and leave join out."
        )
    if engine.training.goes_on_without and (missing := engine.job.missing):
        raise CheckpointError(
            f"save and load take all workers, and {ranks_text(missing)} of this job died or left. "
            f"Training goes on, and the model can be written by any one worker{_after_consensus(engine)}:\n"
            f"torch.save({{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}}, path)"
        )
    return engine


def _after_consensus(engine: Engine) -> str:
    if not engine.training.replicas_differ:
        return ""
    return ". Workers that live have models of their own: let all of them call stretto.consensus(model) first, for the mean"


def _one_or_all(states: list[Any]) -> Any:
    """One optimizer's state stands for itself in a checkpoint, as in torch's own; those of several are a list."""
    return states[0] if len(states) == 1 else states


def _whole_states(engine: Engine) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The model's and the optimizers', on rank 0. Where a model is cut, all workers with a part of rank 0's replica take part."""
    is_cut = in_parts.description(engine.model) is not None
    if engine.job.rank != 0:
        return {}, []
    states = [own_models.state_of(each) for each in engine.loop.optimizers]
    if is_cut:
        pairs = zip(engine.loop.optimizers, states, strict=True)
        states = [in_parts.whole_optimizer_state(*pair) for pair in pairs]
    return engine.model.state_dict(), states


# -- saving -----------------------------------------------------------------------------------------------------------


def _of_this_worker(engine: Engine, sampler: Sampler | None) -> dict[str, Any]:
    """What only this worker knows, as values that msgpack can carry."""
    place = None
    if sampler is not None:
        place = sampler.state_dict()
        place["taken"] = place["taken"][:-1]
    return {
        "rounds": engine.rounds,
        "weight": engine.job.weight,
        "consumed": None if sampler is None else sampler.num_consumed,
        "place": place,
        "random": random_state.capture(engine.model),
        "loop": engine.loop.text(),
        "first_part": in_parts.is_first_part(engine.model),
    }


def _check_loops(path: str, loops: list[str]) -> None:
    """A worker that has taken another step than the others has another model: rank 0's would not be everybody's."""
    for rank, theirs in enumerate(loops):
        if theirs != loops[0]:
            raise CheckpointError(
                f"save({path!r}): the workers are not at the same point of training, so their models differ and one of them "
                f"cannot stand for all.\n  rank 0:{loops[0]}\n  rank {rank}:{theirs}\n"
                f"Save where all workers have taken the same steps with the same learning rates."
            )


def _collect_tensors(engine: Engine, job: Job) -> list[dict[str, Any]]:
    """On rank 0, every worker's local buffers and what its compression remembers of its own. The others keep nothing of it."""
    tensors: list[Tensor] = []
    buffers = {} if engine.broadcast_buffers else _buffers(engine.model)
    mine: dict[str, Any] = {"buffers": buffers, "own": engine.training.state().own}
    if in_parts.description(engine.model) is not None and engine.job.rank == 0:  # what replicas have alike, of this part
        mine["shared"] = engine.training.state().shared
    if engine.training.replicas_differ:
        mine["model"] = own_models.of_this_worker(engine)
    skeletons = job.gather_object(take_apart(mine, tensors))
    out: list[dict[str, Any]] = []
    for rank, skeleton in enumerate(skeletons):
        found = [_sent_to_rank_0(job, tensors, rank, number, kind) for number, kind in enumerate(kinds(skeleton))]
        out.append(put_together(skeleton, iter(found)))
    return out


def _sent_to_rank_0(job: Job, mine: list[Tensor], owner: int, number: int, kind: tuple[str, list[int]]) -> Tensor:
    """One tensor at a time, by a broadcast: there is no limit to its size."""
    if job.rank == owner:
        value = mine[number].cpu().resolve_conj().resolve_neg().contiguous()
    else:
        value = torch.empty(kind[1], dtype=getattr(torch, kind[0]), device="cpu")
    if owner != 0 and value.numel():
        job.broadcast(value, owner)
    return value if job.rank == 0 else torch.empty(0, dtype=torch.float32, device="cpu")


def _stretto_entry(engine: Engine, sampler: Sampler | None, everybody: list[dict[str, Any]]) -> dict[str, Any]:
    job = in_parts.job_of_all(engine.model, engine.job)
    places = [worker.pop("place") for worker in everybody]
    for rank, place in enumerate(places):
        if place != places[0]:
            raise CheckpointError(
                f"ranks are at different places in the data.\n  rank 0: {places[0]}\n  rank {rank}: {place}\n"
                f"Make the sampler alike on all ranks, and save at the same step of the same epoch."
            )
    return {
        "format": FORMAT,
        "versions": {
            "stretto": stretto.__version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "world_size": job.world_size,
        "workers_per_host": job.workers_per_host,
        "strategy": repr(engine.strategy),
        "optimizer": names_of(engine.loop.optimizers),
        "buckets": _layout(engine),
        "mesh": in_parts.description(engine.model),
        "choices": msgspec.to_builtins(engine.job.choices),
        "sampler": None if sampler is None else sampler.state_dict([one["consumed"] for one in in_parts.of_replicas(everybody)]),
        "compress": _compress_entry(engine),
        "ranks": everybody,
    }


def _compress_entry(engine: Engine) -> dict[str, Any] | None:
    if (text := engine.training.state_text) is None:
        return None
    state = engine.training.state()
    shared = {name: {kind: value.cpu() for kind, value in kinds.items()} for name, kinds in state.shared.items()}
    return {"text": text, "rounds": state.rounds, "shared": shared, "placement": engine.training.placement}


def _layout(engine: Engine) -> list[list[str]]:
    """In a job of one there are no buckets, unless gradients are compressed."""
    return [list(bucket.names) for bucket in engine.buckets]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that belong to the state_dict."""
    saved = in_parts.described_state(model).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


# -- loading ----------------------------------------------------------------------------------------------------------


def _checked(copy: str, engine: Engine, sampler: Sampler | None) -> dict[str, Any]:
    """What is in the checkpoint. Its tensors lie in the copy, which is to go: what stays for longer is taken from there."""
    model, optimizers = engine.model, engine.loop.optimizers
    content = torch.load(copy, map_location="cpu", weights_only=True, mmap=True)
    entry = content["stretto"]
    if entry["format"] == 1:  # before there were compressions
        entry["compress"] = None
    elif entry["format"] != FORMAT:
        raise CheckpointError(
            f"it has format {entry['format']}, of stretto {entry['versions']['stretto']}; this is stretto "
            f"{stretto.__version__}, which reads format {FORMAT} and earlier. Use the version that wrote it."
        )
    difference = first_difference(in_parts.described_state(model), content["model"]) or optimizer_difference(optimizers, content)
    difference = difference or _memory_difference(engine, entry)
    if difference is not None:
        raise CheckpointError(
            f"it is of another model or optimizer: {difference}.\n"
            f"Build the model and optimizer as they were when it was saved. To take only some of the weights, load them before "
            f"distribute(): model.load_state_dict(torch.load(path, weights_only=True)['model'], strict=False)."
        )
    if sampler is not None and entry["sampler"] is not None:
        sampler.check_state_dict(entry["sampler"])
    for name in ("extra",) if engine.training.is_in_slices else ("optimizer", "extra"):
        content[name] = deepcopy(content[name])  # an optimizer takes the very tensors that it is given, or copies its slices
    return content  # type: ignore[no-any-return]


def _memory_difference(engine: Engine, entry: dict[str, Any]) -> str | None:
    """What in a saved state of this very way of training cannot belong to this model. Any other state is left out anyway."""
    if entry["compress"] is None or entry["compress"]["text"] != engine.training.state_text:
        return None
    exported = [entry["compress"]["shared"], *(worker["own"] for worker in entry["ranks"])]
    if entry.get("mesh") != in_parts.description(engine.model):
        return None  # it is of other parts of the model, and left out
    if entry.get("mesh") is not None:
        mine = entry["ranks"][in_parts.job_of_all(engine.model, engine.job).rank]
        exported = [mine["own"], _shared(entry, engine)]
    return next((problem for one in exported if (problem := engine.training.check_state(one)) is not None), None)


def _of_snapshot(found: FromSnapshot, sampler: Sampler | None) -> Resumed:
    place = [] if sampler is None else ["the place in the data (a snapshot of servers has none)"]
    return Resumed({"step": found.steps}, found.world_size, tuple(found.carried), (*found.lost, *place))


def _apply(content: dict[str, Any], engine: Engine, sampler: Sampler | None) -> Resumed:
    """Load everything. The generators come last: whatever is done before may draw from them."""
    entry, job = content["stretto"], in_parts.job_of_all(engine.model, engine.job)
    carried, lost = ["model", "optimizer"], []
    engine.model.load_state_dict(content["model"])
    for optimizer, state in zip(engine.loop.optimizers, saved_optimizers(content), strict=True):
        load_exactly(optimizer, in_parts.own_optimizer_state(optimizer, state))
    engine.loop.begin_anew()
    engine.rounds = entry["ranks"][0]["rounds"]
    for found in (_apply_sampler(entry["sampler"], sampler), _apply_choices(entry, engine), _apply_memory(entry, engine)):
        carried += found.carried
        lost += found.lost
    lost += _changes(entry, engine)
    mesh = in_parts.description(engine.model)
    if entry.get("mesh") != mesh:
        lost.append(f"each worker's weight, local buffers and random numbers ({_other_mesh(entry, mesh)})")
    elif entry["world_size"] == job.world_size:
        carried.append("each worker's weight, buffers and random numbers")
        lost += _apply_worker(entry["ranks"][job.rank], engine)
    else:
        then = f"then {entry['world_size']} workers, now {job.world_size}"
        lost.append(f"each worker's weight, local buffers and random numbers ({then})")
    return Resumed(content["extra"], entry["world_size"], tuple(carried), tuple(lost))


def _other_mesh(entry: dict[str, Any], now: dict[str, Any] | None) -> str:
    return f"then {in_parts.text_of(entry.get('mesh'))}, now {in_parts.text_of(now)}"


@dataclass(slots=True)
class _Found:
    carried: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def _apply_sampler(state: dict[str, Any] | None, sampler: Sampler | None) -> _Found:
    if state is None:
        return _Found() if sampler is None else _Found(lost=["the place in the data (it was saved without sampler=...)"])
    if sampler is None:
        return _Found(lost=["the place in the data (give load(..., sampler=...) to go on there)"])
    sampler.load_state_dict(state)
    return _Found(carried=[f"the place in the data (epoch {sampler.epoch})"])


def _apply_choices(entry: dict[str, Any], engine: Engine) -> _Found:
    """What `auto` chose decides in which order gradients are added, hence the last bits. So do bucket sizes, which may follow
    from what it measured."""
    job = engine.job
    if entry["choices"] is None:
        return _Found()
    if entry.get("mesh") is not None or in_parts.description(engine.model) is not None:
        return _Found(lost=["what `auto` chose (measured anew in each group of a mesh)"])
    if (entry["world_size"], entry["workers_per_host"]) != (job.world_size, job.workers_per_host):
        return _Found(lost=["what `auto` chose (other workers or hosts: measured anew)"])
    job.choices = msgspec.convert(entry["choices"], Choices)
    for each in job.engines:
        each.choices_loaded()
    return _Found(carried=["what `auto` chose"])


def _apply_memory(entry: dict[str, Any], engine: Engine) -> _Found:
    """What compressions remember. With another number of workers each takes the mean of what all had: it still gets said.

    Where each worker trains a model of its own, also that model; with another number of workers all begin from the mean."""
    saved, now = entry["compress"], engine.training.state_text
    workers = entry["ranks"]
    mesh = in_parts.description(engine.model)
    if entry.get("mesh") != mesh and (saved is not None or now is not None):
        return _Found(lost=[f"what each worker remembers ({_other_mesh(entry, mesh)})", *own_models.lost(workers)])
    if now is None:
        compress = engine.strategy.compress
        lost = [] if saved is None else [f"what {_answer(saved['text'])} remembered (now compress={compress!r})"]
        return _Found(lost=lost + own_models.lost(workers))
    if saved is None or saved["text"] != now:
        then = "nothing was compressed" if saved is None else f"then {_answer(saved['text'])}"
        return _Found(lost=[f"what {_answer(now)} remembers begins anew ({then})", *own_models.lost(workers)])
    everybody, job = [worker["own"] for worker in workers], in_parts.job_of_all(engine.model, engine.job)
    same = (entry["world_size"], saved.get("placement", "")) == (job.world_size, engine.training.placement)
    if mesh is not None and not same:
        return _Found(lost=["what each worker remembers (other groups of workers)", *own_models.lost(workers)])
    own = deepcopy(everybody[job.rank]) if same else engine.training.shared_out(everybody)
    found = _Found()
    if not same:
        found.lost += own_models.lost(workers)
    elif "model" in workers[job.rank]:
        own_models.apply(workers[job.rank]["model"], engine)
        found.carried.append("each worker's own model and optimizer")
    engine.training.load_state(TrainingState(saved["rounds"], own, deepcopy(_shared(entry, engine))))
    how = f", of {entry['world_size']} workers as their mean" if own and not same else ""
    found.carried.append(f"what {_answer(now)} remembers{how}")
    return found


def _shared(entry: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """What all workers remember alike; where the model is cut, all that have this worker's part."""
    if entry.get("mesh") is None:
        return entry["compress"]["shared"]  # type: ignore[no-any-return]
    return entry["ranks"][in_parts.same_part_of_first_replica(engine.model)]["shared"]  # type: ignore[no-any-return]


def _answer(text: str) -> str:
    """What a state belongs to, as it is written in a strategy. That of a codec is the codec alone."""
    return text if text.startswith("sync=") else f"compress={text}"


def _changes(entry: dict[str, Any], engine: Engine) -> list[str]:
    """What was decided otherwise this time, so that the last bits may differ."""
    if entry["strategy"] != repr(engine.strategy):
        return [f"the strategy (then {entry['strategy']}, now {engine.strategy!r})"]
    if in_parts.description(engine.model) is not None:
        return []
    is_final = engine.training.is_current()  # otherwise it is about to be arranged anew, by what has been loaded
    if is_final and entry["world_size"] == engine.job.world_size and entry["buckets"] != _layout(engine):
        return ["the bucket layout (other parameters are frozen, or workers are on other hosts, or on GPUs where they were not)"]
    return []


def _apply_worker(own: dict[str, Any], engine: Engine) -> list[str]:
    engine.job.weight = own["weight"]
    buffers = _buffers(engine.model)
    with torch.no_grad():
        for name, saved in own["buffers"].items():
            buffers[name].copy_(saved)
    return random_state.restore(own["random"], engine.model)
