"""Chunked cosine transform: a tensor as many small matrices, each seen as frequencies.

A tensor is looked at as a matrix (its first dimension by all the others; a vector or a scalar as one row) and cut into chunks of
c0 x c1, each the largest divisor of that dimension that is at most `chunk`: all chunks of a tensor have one shape. Of a chunk x

    X = D0 x D1',   x = D0' X D1,   D[k, j] = sqrt((2 - [k = 0]) / c) cos(pi (2 j + 1) k / (2 c))        (DCT-II)

Invariant:  D is orthonormal, so norms are kept and the inverse is the transpose, up to rounding.
Cost:       2 (c0 + c1) multiplications and additions per element and direction, as two matrix products over all chunks at once.
A dimension that is prime and larger than `chunk` has only the divisor 1: its chunks are one element wide.
Reference: Ahmed, Natarajan, Rao, "Discrete Cosine Transform", IEEE Trans. Computers, 1974.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosine_matrix(length: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II of that length, float32: row k is the k-th frequency. Made in float64 and rounded once."""
    frequency = torch.arange(length, dtype=torch.float64, device="cpu").unsqueeze(1)
    time = torch.arange(length, dtype=torch.float64, device="cpu")
    waves = torch.cos(math.pi * (2 * time + 1) * frequency / (2 * length)) * math.sqrt(2 / length)
    waves[0] = math.sqrt(1 / length)
    return waves.float().to(device)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`; 1 for 0."""
    return next((d for d in range(min(number, limit), 1, -1) if number % d == 0), 1)


class ChunkedCosine:
    """The transform of one tensor of that shape; it lies flat in memory, its frequencies chunk after chunk."""

    __slots__ = ("_columns", "_grid", "_rows", "num_chunks", "size")

    def __init__(self, shape: tuple[int, ...], chunk: int, device: torch.device) -> None:
        height, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        c0, c1 = largest_divisor(height, chunk), largest_divisor(width, chunk)
        self._grid = (height // c0, c0, width // c1, c1)
        self._rows, self._columns = cosine_matrix(c0, device), cosine_matrix(c1, device)
        self.size = c0 * c1
        self.num_chunks = (height // c0) * (width // c1)

    def forward(self, values: Tensor) -> Tensor:
        """Flat tensor -> (num_chunks, size): the frequencies of each chunk, row by row."""
        n0, c0, n1, c1 = self._grid
        chunks = values.view(n0, c0, n1, c1).transpose(1, 2).reshape(-1, c0, c1)
        return (self._rows @ chunks @ self._columns.T).view(self.num_chunks, self.size)

    def inverse(self, frequencies: Tensor) -> Tensor:
        """(num_chunks, size) -> flat tensor."""
        n0, c0, n1, c1 = self._grid
        chunks = self._rows.T @ frequencies.view(-1, c0, c1) @ self._columns
        return chunks.view(n0, n1, c0, c1).transpose(1, 2).reshape(-1)
