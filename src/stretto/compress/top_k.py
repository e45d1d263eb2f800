"""Top-k: the elements of largest magnitude, and no others.

    C(x)_i = x_i if |x_i| is among the k largest of its tensor, else 0;  k = max(1, ceil(fraction * n))

Ties:       the lower index wins, so what is chosen is a function of the values alone, the same on every device.
Bytes:      for each tensor the lesser of 4 + 8k (a list) and ceil(n / 8) + 4k (a bitmap); see `sparse_format.py`. Known without
            the values. A tensor with fewer than k values that are not zero sends zeros as well.
Contraction: delta = k / n at least, and 1 for vectors with no more than k values that are not zero.
Biased: needs `ErrorFeedback`.
Invariant:  what is sent is exact: encoding what was decoded sends the same values, and the residual is zero where something was
            sent and untouched elsewhere.
Exchange:   every worker's choice differs, so payloads do not add up; they are gathered, (P-1) times their length.
References: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Stich et al., "Sparsified SGD
            with Memory", NeurIPS 2018. Departs from them: the k-th magnitude is exact, where many estimate it from a sample. On a
            CPU the sample only narrows the search, which takes about one pass over memory all the same (`kernels/top_k_cpu.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress import sparse_format
from stretto.compress.backend import Backend, accelerated
from stretto.compress.codec import KernelCodec
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sparse_format import Chosen, Form

MAGNITUDE = 0x7FFFFFFF  # all but the sign of a float32's bits; as integers they order like the magnitudes


def _encode(codec: TopK, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    form = codec.form(blocks)
    chosen = largest(values, form)
    if residual:
        sparse_format.erase(chosen.places, values)
    return sparse_format.write(chosen, form)


def _decode(codec: TopK, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    chosen = sparse_format.read(payload, codec.form(blocks))
    if adding:
        sparse_format.add(chosen, out)
    else:
        out.zero_()[chosen.places] = chosen.values


@dataclass(frozen=True, slots=True)
class TopK(KernelCodec):
    """`fraction`: the share of every tensor's elements that are sent, above 0 and up to 1."""

    fraction: float
    wants_feedback: ClassVar[bool] = True
    encoder = Backend(_encode, cuda="top_k_cuda.encode")
    decoder = Backend(_decode, cuda="sparse_cuda.decode")

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", sparse_format.checked_fraction(self))

    def blocks(self, layout: Layout) -> Blocks:
        return layout.whole()

    def form(self, blocks: Blocks) -> Form:
        return Form.smallest(blocks, sparse_format.counts_of(self.fraction, blocks))

    def num_bytes(self, blocks: Blocks) -> int:
        return self.form(blocks).num_bytes


@accelerated(cpu="top_k_cpu.largest")
def largest(values: Tensor, form: Form) -> Chosen:
    """The `form.counts[b]` elements of largest magnitude of each block; of equals the first.

    Block by block: the k-th magnitude, all above it, and as many of its equals as are missing, in order of index.
    """
    magnitudes = values.view(torch.int32) & MAGNITUDE
    chosen = torch.zeros_like(magnitudes, dtype=torch.bool)
    bounds = form.blocks.bounds.tolist()
    for start, stop, k in zip(bounds[:-1], bounds[1:], form.counts.tolist(), strict=True):
        here = magnitudes[start:stop]
        edge = here.topk(k, sorted=False).values.min()
        above, on_it = here > edge, here == edge
        chosen[start:stop] = above | (on_it & (on_it.cumsum(0) <= k - above.sum()))
    places = chosen.nonzero().flatten()
    return Chosen(places, values[places])
