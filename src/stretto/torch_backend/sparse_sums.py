"""All-reduce of sparse tensors (the gradients of `Embedding(sparse=True)`): everybody gets everybody's entries and adds them up.

Three gathers: how many entries each member has, then their indices and their values, padded to the longest. So (P - 1) times the
entries of the member that has most leave each member; the sum has an entry wherever any member has one.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.exchange import UnderWay
from stretto.compress.rounds import Gather, Steps
from stretto.errors import ConfigurationError
from stretto.torch_backend.exchanges import Exchanges
from stretto.torch_backend.naming import next_name
from stretto.torch_backend.operation import Operation

OPS: Final = ("sum", "mean")


def all_reduce(exchanges: Exchanges, tensor: Tensor, op: str) -> Operation:
    """Replace a sparse COO tensor by the sum or mean over the members."""
    if tensor.layout is not torch.sparse_coo or op not in OPS:
        raise ConfigurationError(
            f"all_reduce(op={op}) of a tensor with layout {tensor.layout}: sparse tensors are combined in COO layout, by sum or "
            f"mean. Write tensor.to_sparse_coo(), or to_dense()."
        )
    group = exchanges.group
    name = next_name(group) if group.size > 1 else None
    mine = tensor.detach().coalesce()
    entries, values = mine.indices(), mine.values()

    def steps() -> Steps:
        counts = (yield Gather(torch.tensor([values.shape[0]], dtype=torch.int64, device="cpu"))).flatten().tolist()
        longest = max(counts)
        if longest == 0:
            return
        all_entries = yield Gather(_padded(entries.t(), longest).reshape(-1))
        all_values = yield Gather(_padded(values, longest).reshape(-1))
        entry_rows = all_entries.view(group.size, longest, entries.shape[0])
        value_rows = all_values.view(group.size, longest, *values.shape[1:])
        together = [(entry_rows[place, :count], value_rows[place, :count]) for place, count in enumerate(counts)]
        indices, numbers = (torch.cat([both[which] for both in together]) for which in (0, 1))
        total = torch.sparse_coo_tensor(indices.t(), numbers, tensor.shape, check_invariants=True)  # they come from others
        total = total.coalesce()  # adds in the order of places, so all members get the same bits
        tensor.copy_(total / group.size if op == "mean" else total)  # a detached one would be another sparse tensor

    def whole() -> UnderWay:
        assert name is not None
        yield from exchanges.drive(steps(), name, "ring", " of a sparse all-reduce")

    if name is None:
        return Operation((), [tensor])
    return Operation([exchanges.submit(whole, tensor.device)], [tensor], None, name)


def _padded(rows: Tensor, length: int) -> Tensor:
    out = rows.new_zeros((length, *rows.shape[1:]))
    out[: rows.shape[0]] = rows
    return out
