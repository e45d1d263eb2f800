"""How long each layer takes, forward and backward, on one micro-batch: what a balanced cut goes by.

Layers are timed one by one, each on what the one before has returned, so that no more than one has to fit beside the model. The
best of a few runs counts: what disturbs a measurement only makes it longer. Nothing of the model changes: buffers are put back,
gradients never reach `p.grad`, and random numbers go on as if nothing had been drawn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from stretto.partition.layers import Layer
from stretto.partition.stage_model import entered
from stretto.partition.trees import changed, take_apart

RUNS: Final = 4  # the first warms up


def measure(layers: Sequence[Layer], sample: Any) -> list[float]:
    """Seconds of one forward and backward of each layer."""
    devices = sorted({p.device.index for layer in layers for p in layer.module.parameters() if p.is_cuda})
    seconds = []
    with torch.random.fork_rng(devices):
        value = sample
        for layer in layers:
            kept = [(buffer, buffer.clone()) for buffer in layer.module.buffers()]
            try:
                times, value = zip(*(_once(layer.module, value) for _ in range(RUNS)), strict=True)
            finally:
                with torch.no_grad():
                    for buffer, before in kept:
                        buffer.copy_(before)
            seconds.append(min(times[1:]))
            value = value[-1]
    return seconds


def _once(module: nn.Module, value: Any) -> tuple[float, Any]:
    given = changed(value, _fresh, "what a layer returns")
    _, leaves = take_apart(given, "what a layer returns")
    parameters = [p for p in module.parameters() if p.requires_grad]
    began = _now(parameters)
    with torch.enable_grad():
        returned = module(changed(given, entered))
        outputs = [tensor for tensor in take_apart(returned, "what a layer returns")[1] if tensor.requires_grad]
        wanted = [*parameters, *(leaf for leaf in leaves if leaf.requires_grad)]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(each) for each in outputs], allow_unused=True)
    return _now(parameters) - began, changed(returned, Tensor.detach)


def _fresh(tensor: Tensor) -> Tensor:
    """A copy, which the layer may change in place, and whose gradient is wanted as in training."""
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _now(parameters: Sequence[Tensor]) -> float:
    for device in {p.device for p in parameters if p.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()
