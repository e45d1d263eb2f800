"""What training by all-reduce refuses, before anything is sent: what was asked, why it cannot work, what to write instead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.value import AllReduce
from stretto.compress.codec import Compression
from stretto.engine.per_parameter import check_per_parameter
from stretto.errors import ConfigurationError
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy

log = logging.getLogger("stretto")


def check_order(strategy: Strategy, all_reduce: AllReduce) -> None:
    """torch's own collectives run in one order on all workers, while the caller waits."""
    schedule = strategy.schedule
    if all_reduce.algorithm == "native" and schedule.cross_barrier:
        raise ConfigurationError(
            f'aggregate=AllReduce("native") with schedule={schedule!r}: the collectives of torch run one after the other while '
            f"the caller waits, so none can be under way during the next forward.\nWrite aggregate=AllReduce()."
        )


def check_payloads(strategy: Strategy, all_reduce: AllReduce, name: str = "aggregate") -> None:
    """Whether what the compression sends can be combined by the algorithm that was asked for, under this name."""
    algorithm = all_reduce.algorithm
    reason = None if algorithm == "auto" else strategy.compress.refusal(algorithm)
    if reason is not None:
        raise ConfigurationError(
            f"aggregate={strategy.aggregate!r} with compress={strategy.compress!r}: {reason}.\n"
            f"Write {name}=AllReduce(), which exchanges payloads in the way that suits them."
        )


def check_compression(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> None:
    """Whether gradients of these parameters can be compressed so, and whether the optimizer suits what comes out."""
    compress = strategy.compress
    for name, parameter in model.named_parameters():
        lossless = compress.for_parameter(name, tuple(parameter.shape)).lossless
        if parameter.requires_grad and not lossless and not parameter.is_floating_point():
            raise ConfigurationError(
                f"compress={compress!r}: {name} is of {parameter.dtype}, and codecs work on real floating-point gradients.\n"
                f"Leave it out: compress=ByParameter(({name!r}, NoCompression()), ('*', ...))."
            )
    for optimizer in optimizers:
        if compress.optimizer_hint is not None and (own := _momentum_of(optimizer)) is not None:
            raise ConfigurationError(
                f"compress={compress!r} keeps the momentum itself, before gradients are sent, and {type(optimizer).__name__} has "
                f"{own} of its own: it would be applied twice.\nWrite {compress.optimizer_hint}"
            )


def check_crossing(optimizers: Sequence[Optimizer], strategy: Strategy) -> None:
    """Whether each parameter can be updated by itself, when its own gradient has come."""
    if strategy.schedule.cross_barrier:
        for optimizer in optimizers:
            check_per_parameter(optimizer, f"schedule={strategy.schedule!r}")


def warn_of_host_memory(name: str, devices: Sequence[torch.device], job: Job) -> None:
    """`Strategy.bind` had the gradients combined on GPUs if the model was there."""
    workers_share_a_host = len({peer.host for peer in job.peers}) < job.world_size
    if workers_share_a_host and any(device.type == "cuda" for device in devices):
        log.warning(
            "the gradients of %s lie on a GPU and go through host memory: when distribute() was called the model was not on a "
            "GPU on all workers. Move it there first: model.to(stretto.device()), then stretto.distribute(model, optimizer).",
            name,
        )  # fmt: skip


def warn_of_lost_gradients(model: nn.Module, compress: Compression) -> None:
    """Codecs that leave out most of a gradient train badly unless what they leave out is remembered."""
    answers = {compress.for_parameter(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    without = sorted(repr(answer) for answer in answers if answer.wants_feedback)
    if without:
        log.warning(
            "compress=%r: what %s leaves out of a gradient is lost for good, which costs some 7 %% of the loss in "
            "docs/compression.md. Write ErrorFeedback(%s), which says it in later steps.", compress, without[0], without[0],
        )  # fmt: skip


def _momentum_of(optimizer: Optimizer) -> str | None:
    """What the optimizer remembers of earlier gradients, in its own words; None if nothing. Of torch's only SGD need not."""
    for group in optimizer.param_groups:
        for option in ("momentum", "betas", "beta1", "rho", "alpha", "lr_decay", "etas"):
            if group.get(option):
                return f"{option}={group[option]}"
    if type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.SGD):
        return "a memory of gradients"
    return None


def check_native(strategy: Strategy, job: Job) -> None:
    if job.native is None:
        raise ConfigurationError(
            f"{strategy.aggregate!r} is the torch backend's own collective, and this job runs on another wire.\n"
            f'Start it with stretto.init(wire="gloo") or stretto.init(wire="nccl"), or use AllReduce("auto").'
        )
