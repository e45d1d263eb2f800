"""What distribute() refuses, before anything is sent: each with what was asked, why it cannot work, and what to write instead."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from stretto.collectives.reduction import dtype_code
from stretto.engine.other_trainers import refuse_averaging_optimizer, refuse_other_trainers
from stretto.errors import ConfigurationError
from stretto.job import Job

COLLECTION_S = 2.0  # to wait for another thread's
log = logging.getLogger("stretto")


def check(model: object, optimizers: Sequence[object], buffers: object, check_finite: object, scaler: object = None) -> None:
    """The types and values of the arguments."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"distribute({type(model).__name__}, ...): the first argument is the nn.Module to train.")
    if not optimizers:
        raise ConfigurationError("distribute(model, (), ...): no optimizer. Give the one that steps the model, or several.")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"distribute(model, {type(optimizer).__name__}, ...): the second argument is the torch optimizer over the "
                f"model's parameters, or several of them. Write for instance torch.optim.SGD(model.parameters(), lr=0.1)."
            )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ConfigurationError("distribute(model, (optimizer, optimizer)): the same one twice. Give every optimizer once.")
    if buffers not in ("broadcast", "local"):
        raise ConfigurationError(f"buffers={buffers!r}: write 'broadcast' or 'local'.")
    if not isinstance(check_finite, bool):
        raise ConfigurationError(f"check_finite={check_finite!r}: write True or False.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigurationError(f"scaler={scaler!r}: give the torch.amp.GradScaler of the loop, or leave it out.")


def check_model(model: nn.Module, optimizers: Sequence[Optimizer], job: Job) -> None:
    """Whether this model can be trained with these optimizers here."""
    refuse_other_trainers(model)
    for optimizer in optimizers:
        refuse_averaging_optimizer(optimizer)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigurationError(
                f"parameter {name} is lazy and has no shape yet, so there is nothing to share.\n"
                f"Call the model's forward once, with any input, before distribute()."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            f"{type(model).__name__} has no parameter that wants a gradient, so there is nothing to train.\n"
            f"Unfreeze something (requires_grad_(True)) before distribute()."
        )
    _check_parameters_are_free(model, job)
    for optimizer in optimizers:
        check_optimizer(model, optimizer)


def _check_parameters_are_free(model: nn.Module, job: Job) -> None:
    """Models of jobs that are over do not count: they may be trained again, in this one. Nor do models that nobody has any more:
    they are collected first, for otherwise it would depend on the collector's mood, on each worker, what is refused."""
    if _problem_with_parameters(model, job) is None:
        return
    _collect()
    if (problem := _problem_with_parameters(model, job)) is not None:
        raise ConfigurationError(problem)


def _collect() -> None:
    """A full garbage collection. While another thread is in one, `gc.collect` returns at once with nothing done: so again."""
    me, done = threading.get_ident(), threading.Event()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and threading.get_ident() == me:
            done.set()

    gc.callbacks.append(note)
    try:
        until = time.monotonic() + COLLECTION_S
        gc.collect()
        while not done.is_set() and time.monotonic() < until:
            time.sleep(0.01)
            gc.collect()
    finally:
        gc.callbacks.remove(note)


def _problem_with_parameters(model: nn.Module, job: Job) -> str | None:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for engine in job.engines:
        if unwrapped(model) is engine.model:
            continue  # its new strategy takes the place of the old one
        shared = [names[parameter] for parameter in engine.model.parameters() if parameter in names]
        if shared:
            return (
                f"parameter {shared[0]} is part of a model that has been distributed before ({engine.name}), and its gradient "
                f"would be combined twice.\nDistribute one module that contains both, with one optimizer; or give the former "
                f"one up first: stretto.release(that_model)."
            )
    return None


def wrappings(model: nn.Module) -> list[nn.Module]:
    """The model and, where torch.compile has wrapped it, the one inside: both are names for the same."""
    inside = model._modules.get("_orig_mod")
    return [model] if inside is None else [model, inside]


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain model, whose parameters have the names that its author gave them."""
    return wrappings(model)[-1]


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """At the beginning, and again when parameters were added to the optimizer."""
    parameters = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in parameters:
                raise ConfigurationError(
                    f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that is not one of the model's: its "
                    f"gradient would not be combined.\nMake the optimizer over model.parameters() of the very model given here."
                )


def check_world(model: nn.Module) -> None:
    """What only matters with several workers: whether everything can travel."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or tensor.layout is not torch.strided:
            what = "on the meta device and holds no numbers" if tensor.is_meta else f"of layout {tensor.layout}"
            raise ConfigurationError(
                f"{name} of {type(model).__name__} is {what}, so it cannot be sent to the other workers.\n"
                f"Give it memory before distribute(): model.to_empty(device=...) and its initial values, or tensor.to_dense()."
            )
        try:
            dtype_code(tensor.dtype)
        except ConfigurationError as problem:
            raise ConfigurationError(f"{name} of {type(model).__name__}: {problem}") from None
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and not torch.distributed.is_initialized():
            raise ConfigurationError(
                f"SyncBatchNorm {name!r} is torch's: it synchronises through torch.distributed, which is not initialised, and "
                f"would quietly be a plain BatchNorm.\nWrite model = stretto.SyncBatchNorm.convert_sync_batchnorm(model), which "
                f"works on CPU and GPU over this job; or use nn.GroupNorm."
            )
