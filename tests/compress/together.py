"""Running the exchanges of several workers side by side, without a wire: every collective is carried out on their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.compress.codec import Compression
from stretto.compress.layout import Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import Collective, ExchangeContext, Gather, Steps, Sum, SumInHops, Transpose
from stretto.compress.state import CompressionState


class Workers:
    """P workers with one bucket each. `round` takes their gradients, returns what each ends up with, and commits their state."""

    def __init__(
        self, compression: Compression, named: Sequence[tuple[str, Sequence[int]]], size: int, algorithm: str = "auto"
    ) -> None:
        self.compression = compression
        self.layout = Layout.of(named)
        self.states = [CompressionState(self.layout, torch.device("cpu")) for _ in range(size)]
        self.kept: list[dict[object, object]] = [{} for _ in range(size)]
        self.algorithm = algorithm
        self.rounds = 0
        self.bytes_sent = [0] * size  # of collectives other than sums, which depend on the algorithm

    def round(self, gradients: Sequence[Tensor], *, commit: bool = True) -> list[Tensor]:
        values = [gradient.detach().clone().float() for gradient in gradients]
        self.drive([self.compression.exchange(value, self.turn(rank)) for rank, value in enumerate(values)])
        for state in self.states:
            state.commit() if commit else state.discard()
        self.rounds += 1
        return values

    def turn(self, rank: int) -> ExchangeContext:
        draw = RandomKeys.of_round(self.rounds, rank)
        return ExchangeContext(self.layout, self.states[rank], draw, rank, len(self.states), self.algorithm, self.kept[rank])

    def drive(self, generators: list[Steps]) -> None:
        asked = [next(generator, None) for generator in generators]
        while any(one is not None for one in asked):
            assert all(type(one) is type(asked[0]) for one in asked), f"workers ask for different collectives: {asked}"
            results = self.carry_out([one for one in asked if one is not None])
            asked = [_resume(generator, result) for generator, result in zip(generators, results, strict=True)]

    def carry_out(self, asked: list[Collective]) -> list[Tensor]:
        if isinstance(asked[0], Sum):
            total = torch.stack([one.tensor for one in asked if isinstance(one, Sum)]).sum(0)
            return [total.clone() for _ in asked]
        if isinstance(asked[0], Gather):
            rows = [one.row for one in asked if isinstance(one, Gather)]
            self._count([len(row) * row.element_size() * (len(asked) - 1) for row in rows])
            table = torch.stack(rows)  # before anything is written: a row may lie in the memory that is written to
            return [table.clone() if one.into is None else one.into.copy_(table) for one in asked if isinstance(one, Gather)]
        if isinstance(asked[0], Transpose):
            tables = [one.rows for one in asked if isinstance(one, Transpose)]
            self._count([table[0].numel() * table.element_size() * (len(asked) - 1) for table in tables])
            return [torch.stack([table[rank] for table in tables]).clone() for rank in range(len(asked))]
        assert isinstance(asked[0], SumInHops)
        raise NotImplementedError("hops are tested on a wire")

    def _count(self, num_bytes: list[int]) -> None:
        self.bytes_sent = [before + more for before, more in zip(self.bytes_sent, num_bytes, strict=True)]


def _resume(generator: Steps, result: Tensor) -> Collective | None:
    try:
        return generator.send(result)
    except StopIteration:
        return None
