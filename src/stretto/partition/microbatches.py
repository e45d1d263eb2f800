"""A batch cut into micro-batches, and what comes of them put together.

Every tensor of a batch has its samples along its first dimension; plain values go with every micro-batch. B samples in at most
M micro-batches: as equal as can be, the longer ones first, and B of one sample where B < M. So a last batch that is smaller, or
that M does not divide, is an ordinary one. A mean over a micro-batch of b samples then counts b/B of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stretto.errors import ConfigurationError
from stretto.partition.trees import put_together, take_apart


def samples_in(batch: Any, what: str) -> int:
    """How many samples a batch has: the length of its tensors' first dimension."""
    _, tensors = take_apart(batch, what)
    lengths = {tensor.shape[0] if tensor.dim() else -1 for tensor in tensors}
    if len(lengths) != 1 or min(lengths) < 1:
        raise ConfigurationError(
            f"{what} has tensors of shapes {[list(tensor.shape) for tensor in tensors]}: a batch is cut into micro-batches along "
            f"the first dimension, which must be the number of samples in all of them, and 1 or more.\n"
            f"Give what belongs to no sample as a plain value, or let a layer hold it as a buffer."
        )
    return lengths.pop()


def sizes_of(samples: int, microbatches: int) -> list[int]:
    """How many samples each micro-batch has."""
    number = min(samples, microbatches)
    return [samples // number + (each < samples % number) for each in range(number)]


def cut(batch: Any, sizes: Sequence[int], what: str) -> list[Any]:
    """The micro-batches of a batch, which are views of it."""
    shape, tensors = take_apart(batch, what)
    parts = [torch.split(tensor, list(sizes)) for tensor in tensors]
    return [put_together(shape, [part[number] for part in parts]) for number in range(len(sizes))]


def joined(trees: Sequence[Any], what: str) -> Any:
    """The outputs of all micro-batches as one, along the first dimension."""
    apart = [take_apart(tree, what) for tree in trees]
    shape, _ = apart[0]
    if any(other != shape for other, _ in apart) or any(not tensor.dim() for _, tensors in apart for tensor in tensors):
        raise ConfigurationError(
            f"{what} cannot be put together: micro-batches gave values of different structure, or tensors without a dimension.\n"
            f"Let the last layer return tensors whose first dimension is that of the samples."
        )
    return put_together(shape, [torch.cat(parts) for parts in zip(*(tensors for _, tensors in apart), strict=True)])
