"""Random-k: k elements chosen by chance, the same on all workers, so that payloads add up.

    C(x)_i = x_i (n / k if `scaled`) if i is among the k chosen of its tensor's n, else 0;  k = max(1, ceil(fraction * n))

Choice:     the first k of a permutation of 0 .. n-1, a function of the round (`random.shared`) and of the tensor's key, so nobody
            sends indices. Element j of the permutation is computed from j alone:

                (r, c) = (j div C, j mod C)                     a grid of R x C >= n places, R = ceil(sqrt n), C = ceil(n / R)
                r += h0(c) mod R; c += h1(r) mod C; r += h2(c) mod R; c += h3(r) mod C          four Feistel rounds
                again, while the place r C + c is not below n                                    (cycle walking)
                place += offset mod n

            h_t(v) = mix(v + key_t) R / 2^32 (or C), offset = (key_4 div 2) n / 2^31, both rounded down, with
            key_t = mix(mix(keys[b] xor shared) + (t+1) 0x9E3779B9) (`random_numbers.py`).
            The offset makes every element's chance exactly k/n (to 2^-31) even where the grid is small and does not fit.
Bytes:      4k for each tensor: float32, in order of the permutation; unordered, because sorting would cost more than it brings.
Unscaled:   a contraction with delta = k / n in expectation; biased, needs `ErrorFeedback`.
Scaled:     unbiased, E|C(x) - x|^2 = (n/k - 1) |x|^2; no contraction unless k > n/2, so not for `ErrorFeedback`, whose residual
            would grow. What exceeds float32 when scaled is cut to its largest value.
Exchange:   payloads are summed by any all-reduce: 2 * 4k (P-1)/P bytes sent, however many workers.
References: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
            CT-RSA 2002, for the grid and the walk. Departs from the latter: rounds of low bias, not of cryptographic strength,
            and the offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress import sparse_format
from stretto.compress.backend import accelerated
from stretto.compress.checks import check
from stretto.compress.codec import Codec
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import GOLDEN, RandomKeys, mix_tensor
from stretto.compress.sparse_format import Chosen
from stretto.errors import MalformedPayload

ROUNDS = 4
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class RandomK(Codec):
    """`fraction`: the share of every tensor's elements that are sent. `scaled`: multiply them by n/k, which makes it unbiased."""

    fraction: float
    scaled: bool = False
    payload_dtype: ClassVar[torch.dtype | None] = torch.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", sparse_format.checked_fraction(self))
        instead = f"ErrorFeedback(RandomK({self.fraction})), or RandomK({self.fraction}, scaled=True) without error feedback"
        check(isinstance(self.scaled, bool), self, "scaled", "that is neither True nor False", instead)

    @property
    def wants_feedback(self) -> bool:  # type: ignore[override]
        return not self.scaled

    @property
    def no_residual(self) -> str | None:  # type: ignore[override]
        return "scaled values are n/k times too large one by one, and what is left over would grow" if self.scaled else None

    def blocks(self, layout: Layout) -> Blocks:
        return layout.whole()

    def num_bytes(self, blocks: Blocks) -> int:
        return 4 * int(self.counts(blocks).sum())

    def counts(self, blocks: Blocks) -> Tensor:
        return sparse_format.counts_of(self.fraction, blocks)

    def encode(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        counts = self.counts(blocks)
        return self._sent(values, places(blocks, counts, random, values.device), blocks, counts).view(torch.uint8)

    def encode_residual(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        counts = self.counts(blocks)
        where = places(blocks, counts, random, values.device)
        sent = self._sent(values, where, blocks, counts)
        if self.scaled:
            values[where] = values[where] - sent
        else:
            sparse_format.erase(where, values)
        return sent.view(torch.uint8)

    def decode(self, payload: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        return sparse_format.spread(self._read(payload, blocks, random), blocks.num_elements)

    def add_decoded(self, payload: Tensor, blocks: Blocks, random: RandomKeys, total: Tensor) -> None:
        sparse_format.add(self._read(payload, blocks, random), total)

    def _sent(self, values: Tensor, where: Tensor, blocks: Blocks, counts: Tensor) -> Tensor:
        chosen = values[where]
        if not self.scaled:
            return chosen
        factors = torch.repeat_interleave((blocks.lengths / counts).float(), counts).to(values.device)
        return chosen.mul_(factors).clamp_(-LARGEST, LARGEST)

    def _read(self, payload: Tensor, blocks: Blocks, random: RandomKeys) -> Chosen:
        counts = self.counts(blocks)
        if len(payload) != 4 * int(counts.sum()):
            raise MalformedPayload(f"{len(payload)} bytes, not {4 * int(counts.sum())}")
        sent = sparse_format.words_of(payload).view(torch.float32)
        if not bool(sent.isfinite().all()):
            raise MalformedPayload("a value is not finite")
        return Chosen(places(blocks, counts, random, payload.device), sent)


def places(blocks: Blocks, counts: Tensor, random: RandomKeys, device: torch.device) -> Tensor:
    """The places of `counts[b]` distinct elements of each block, drawn by `random.shared`; in order of blocks, else unordered."""
    return draw_places.on(device)(blocks, counts, random, device)


def grid(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns, as near to a square as holds that many places."""
    rows = lengths.double().sqrt().ceil().long()
    return rows, (lengths + rows - 1) // rows


@accelerated(cpu="sparse_cpu.places")
def draw_places(blocks: Blocks, counts: Tensor, random: RandomKeys, device: torch.device) -> Tensor:
    (bounds, block_keys), first = blocks.on(device), (counts.cumsum(0) - counts).to(device)
    blocks_of = torch.arange(len(blocks), device=device, dtype=torch.int64)
    numbers = torch.repeat_interleave(blocks_of, counts.to(device), output_size=int(counts.sum()))
    steps = GOLDEN * torch.arange(1, ROUNDS + 2, device=device, dtype=torch.int64)
    keys = mix_tensor(mix_tensor(block_keys ^ random.shared)[:, None] + steps)[numbers]
    lengths, starts = bounds.diff()[numbers], bounds[numbers]
    rows, columns = grid(lengths)
    at = permuted(torch.arange(len(numbers), device=device, dtype=torch.int64) - first[numbers], rows, columns, keys)
    while bool((outside := at >= lengths).any()):
        at[outside] = permuted(at[outside], rows[outside], columns[outside], keys[outside])
    at += ((keys[:, ROUNDS] >> 1) * lengths) >> 31
    return starts + torch.where(at >= lengths, at - lengths, at)


def permuted(at: Tensor, rows: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
    row, column = at // columns, at % columns
    for number in range(0, ROUNDS, 2):
        row = (row + (mix_tensor(column + keys[:, number]) * rows >> 32)) % rows
        column = (column + (mix_tensor(row + keys[:, number + 1]) * columns >> 32)) % columns
    return row * columns + column
