"""The mean over workers of how far each has moved since they last held the same weights, encoded as `compress` says.

The differences of some parameters are one float32 vector. Parameters for which `compress` gives the same codec are encoded
together, each in blocks of its own, and every such group is exchanged as gradients are (`all_reduce/exchange.py`): with the same
codecs, error feedback and random numbers. With error feedback, what a payload leaves out is part of the worker's next difference.

Values that are not finite cannot be encoded. So before anything is encoded, workers tell each other whether their differences are
finite, and all raise the same error if one is not. (Uncompressed, NaN spreads by itself, as it does in a mean of gradients.)

Invariant: all workers end with the same bits. The new state that an exchange proposes is kept only if the exchange ends well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.exchange import MOST, ExchangeDriver, Mean, Sending, Steps, UnderWay, side_by_side
from stretto.collectives.group import Group
from stretto.compress.codec import Compression
from stretto.compress.layout import Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext, Sum
from stretto.compress.state import CompressionState, Exported
from stretto.engine.finite import is_finite
from stretto.errors import NonFiniteGradient

Shapes = Sequence[tuple[str, tuple[int, ...]]]


class _Encoded:
    """Parameters that are encoded together: where they lie in the vector, and what their compression remembers."""

    def __init__(self, compression: Compression, shapes: Shapes, places: Sequence[slice], device: torch.device) -> None:
        self.compression = compression
        self.places = places
        self.layout = Layout.of(shapes)
        self.state = CompressionState(self.layout, device)
        self.kept: dict[Any, Any] = {}
        self.context: ExchangeContext | None = None

    def exchange(self, values: Tensor, group: Group, algorithm: str) -> Steps:
        draw = RandomKeys.of_round(self.state.rounds, group.rank)
        self.context = ExchangeContext(self.layout, self.state, draw, group.rank, group.size, algorithm, self.kept)
        mine = values if self.layout.num_elements == len(values) else torch.cat([values[place] for place in self.places])
        yield from self.compression.exchange(mine, self.context)
        if mine is not values:
            start = 0
            for place in self.places:
                stop = start + place.stop - place.start
                values[place] = mine[start:stop]
                start = stop


class DeltaExchange:
    """Brings the differences of these parameters together, again and again. `shapes`: their names and shapes, in the order in
    which they lie in the vector."""

    def __init__(self, shapes: Shapes, compress: Compression, group: Group, algorithm: str, device: torch.device) -> None:
        self._group, self._algorithm = group, algorithm
        self._names: list[tuple[str, slice]] = []
        grouped: dict[Compression, tuple[list[tuple[str, tuple[int, ...]]], list[slice]]] = {}
        stop = 0
        for name, shape in shapes:
            start, stop = stop, stop + torch.Size(shape).numel()
            self._names.append((name, slice(start, stop)))
            named, places = grouped.setdefault(compress.for_parameter(name, shape), ([], []))
            named.append((name, shape))
            places.append(slice(start, stop))
        self._encoded = [] if compress.lossless else [_Encoded(answer, *of, device) for answer, of in grouped.items()]

    @property
    def num_numbers(self) -> int:
        """How many numbers in the model's channel an exchange may take: the first for `check`, the others for the values."""
        return 1 + MOST * max(1, len(self._encoded))

    def mean(self, values: Tensor, driver: ExchangeDriver, number: int, label: str, beside: Tensor | None = None) -> UnderWay:
        """Replace `values`, this worker's, by the mean over all workers; and `beside`, one number that is never encoded.

        `number`: the first of `num_numbers`. `check` may be called before, with the same one."""
        if not self._encoded:
            together = values if beside is None else torch.cat((values, beside))
            yield from driver.drive(_mean(together), number + 1, label, Sending())
            if beside is not None:
                values.copy_(together[:-1])
                beside.copy_(together[-1:])
            return
        yield from self.check(values, driver, number, label, beside)
        yield from side_by_side(
            driver.drive(each.exchange(values, self._group, self._algorithm), number + 1 + MOST * place, label, Sending())
            for place, each in enumerate(self._encoded)
        )

    def check(self, values: Tensor, driver: ExchangeDriver, number: int, label: str, beside: Tensor | None = None) -> UnderWay:
        """Raise on all workers if somebody's values are not finite, naming whose and which. `beside` becomes the mean."""
        size = self._group.size
        # On the device of the values: NCCL, where it is asked for, takes nothing else.
        bad = torch.zeros(size + (beside is not None), dtype=torch.float32, device=values.device)
        if beside is not None:
            bad[size:] = beside
        if not is_finite(values):
            bad[self._group.rank] = 1 + next(place for place, (_, part) in enumerate(self._names) if not is_finite(values[part]))
        yield from driver.drive(_sum(bad), number, label, Sending())
        if found := {rank: self._names[int(place) - 1][0] for rank, place in enumerate(bad[:size].tolist()) if place}:
            raise NonFiniteGradient(found, "a weight")
        if beside is not None:
            beside.copy_(bad[size:] / size)

    # -- what is remembered -------------------------------------------------------------------------------------------

    def end(self, *, good: bool) -> None:
        """What the exchange has proposed becomes the state, or is forgotten."""
        for each in self._encoded:
            if each.context is not None:
                (each.state.commit if good else each.state.discard)()
                each.context = None

    @property
    def rounds(self) -> int:
        return self._encoded[0].state.rounds if self._encoded else 0

    def export(self) -> tuple[Exported, Exported]:
        """What is this worker's own, and what is shared, by parameter."""
        own: Exported = {}
        shared: Exported = {}
        for each in self._encoded:
            own |= each.state.own.export()
            shared |= each.state.shared.export()
        return own, shared

    def restore(self, rounds: int, own: Exported, shared: Exported) -> None:
        """This must be fresh."""
        for each in self._encoded:
            each.state.rounds = rounds
            each.compression.restore(each.state, own, shared, self._group.rank, self._group.size)


def _mean(values: Tensor) -> Steps:  # of what is not compressed
    yield Mean(values)


def _sum(values: Tensor) -> Steps:
    yield Sum(values)
