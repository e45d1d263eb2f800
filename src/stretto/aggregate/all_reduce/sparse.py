"""Sparse gradients: gathered, not summed in place.

The rows that were touched differ from worker to worker, so buckets cannot hold them. Each worker's indices and values are padded
to the longest, gathered, and added up in rank order: the same bits everywhere.

An embedding that asks for sparse gradients gets a dense one where its weight is also used otherwise (tied to an output layer). If
that is so on any worker, all get a dense one: an optimizer can do with one kind only.

Cost: an all-gather of the longest worker's rows; cheap while few rows are touched, worse than dense when most are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.engine.bucket import gradient_dtype
from stretto.job import Job


def exchange_sparse(job: Job, named: Sequence[tuple[str, Tensor]], weight: float, combined_weight: float) -> None:
    """Replace each parameter's sparse gradient by the weighted mean over all workers."""
    for _, parameter in named:
        gradient = parameter.grad
        parameter.grad = _exchange(job, parameter, gradient, weight, combined_weight)


def _exchange(job: Job, parameter: Tensor, gradient: Tensor | None, weight: float, combined_weight: float) -> Tensor | None:
    is_dense = gradient is not None and not gradient.is_sparse
    if is_dense or gradient is None:
        num_rows = 0
    else:
        gradient = gradient.coalesce()
        num_rows = gradient.indices().shape[1] if weight else 0  # not 0 x NaN, where a worker without data has nothing to say
    lengths = job.all_gather(torch.tensor([num_rows, int(gradient is not None), int(is_dense)], dtype=torch.int64, device="cpu"))
    if not int(lengths[:, 1].sum()):
        return None
    if int(lengths[:, 2].sum()):
        return _reduce_dense(job, parameter, gradient, weight, combined_weight)
    if gradient is None:
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *parameter.shape[1:]), dtype=gradient_dtype(parameter), device=parameter.device)
    else:
        indices, values = gradient.indices()[:, :num_rows], gradient.values()[:num_rows] * weight
    longest = int(lengths[:, 0].max())
    all_indices = job.all_gather(_pad(indices.t().contiguous(), longest))
    all_values = job.all_gather(_pad(values, longest))
    rows = [(all_indices[rank, :length], all_values[rank, :length]) for rank, length in enumerate(lengths[:, 0].tolist())]
    indices, values = torch.cat([part for part, _ in rows]).t(), torch.cat([part for _, part in rows])
    # Said outright, because torch 2.11 warns about leaving it open.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        total = torch.sparse_coo_tensor(indices, values, parameter.shape, dtype=values.dtype, device=values.device).coalesce()
    return total / (combined_weight * job.world_size) if combined_weight else total


def _reduce_dense(job: Job, parameter: Tensor, gradient: Tensor | None, weight: float, combined_weight: float) -> Tensor:
    total = torch.zeros(parameter.shape, dtype=gradient_dtype(parameter), device=parameter.device)
    if gradient is not None and weight:
        total.copy_(gradient.to_dense() if gradient.is_sparse else gradient).mul_(weight)
    job.all_reduce(total, op="mean", algorithm="ring")
    return total.div_(combined_weight) if combined_weight else total


def _pad(rows: Tensor, length: int) -> Tensor:
    padded = torch.zeros((length, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    padded[: rows.shape[0]] = rows
    return padded
