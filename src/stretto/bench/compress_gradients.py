"""The values that codecs are measured on: tensors as a model has them, not one long row of numbers.

`layout_of` cuts n values into layers of a square matrix, 1024 x 1024 or the largest power of two that fits, and a bias; what is
left over is a matrix of fewer rows, and a vector. So codecs for matrices (PowerSGD, DGC, DeMo) have some.

Two kinds of values, both with a mean square of 1:

    gaussian        independent normal numbers: nothing to exploit, and what the theory of codecs is written for
    gradient-like   each matrix is 8 directions whose strengths fall as 1/i, and noise of half the strength of the first, with
                    Student's t distribution of 3 degrees (tails as heavy as |x|^-4); its rows differ in scale, log-normal with
                    sigma 1. Vectors are noise alone.

The second is a caricature of gradients, not a recording: real ones differ by model and by time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.compress.layout import Layout, TensorPlace

SIDE = 1024
DIRECTIONS = 8
KINDS = ("gaussian", "gradient-like")


def layout_of(num_elements: int) -> Layout:
    side = min(SIDE, 1 << int(math.log2(max(1.0, math.sqrt(num_elements)))))
    while side > 1 and side * (side + 1) > num_elements:
        side //= 2
    tensors: list[tuple[str, tuple[int, ...]]] = []
    left, layer = num_elements, 0
    while left >= side * (side + 1):
        tensors += [(f"layers.{layer}.weight", (side, side)), (f"layers.{layer}.bias", (side,))]
        left, layer = left - side * (side + 1), layer + 1
    if left >= side:
        tensors.append(("head.weight", (left // side, side)))
    if left % side:
        tensors.append(("head.bias", (left % side,)))
    return Layout.of(tensors)


def values_of(kind: str, layout: Layout, seed: int, device: torch.device) -> Tensor:
    """A vector of that layout; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(layout.num_elements, generator=generator).to(device)
    parts = [_gradient(place, generator).reshape(-1) for place in layout.places]
    values = torch.cat([torch.empty(0), *parts])
    return values.div_(values.square().mean().sqrt()).to(device)


def _gradient(place: TensorPlace, generator: torch.Generator) -> Tensor:
    noise = _heavy_tailed(place.shape, generator)
    if len(place.shape) < 2:
        return noise
    rows, columns = place.shape
    strengths = 1.0 / torch.arange(1, DIRECTIONS + 1)
    left = torch.randn(rows, DIRECTIONS, generator=generator) * strengths
    scale = torch.randn(rows, 1, generator=generator).exp_()
    return noise.mul_(0.5).addmm_(left, torch.randn(DIRECTIONS, columns, generator=generator)).mul_(scale)


def _heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Student's t with 3 degrees of freedom, scaled to variance 1."""
    squares = torch.zeros(shape)
    for _ in range(3):
        squares += torch.randn(shape, generator=generator).square_()
    return torch.randn(shape, generator=generator).div_(squares.sqrt_())
