"""Threshold: every element whose magnitude reaches a given value.

    C(x)_i = x_i if |x_i| >= value, else 0

Bytes:      4 + 8c for each tensor of which c elements are chosen, as a list (`sparse_format.py`): it depends on the values, so
            the exchange gathers lengths first. At most 4 + 8n.
Error:      |x_i - C(x)_i| < value for every element. No contraction: a vector below the threshold is not sent at all. With
            `ErrorFeedback` it is sent once enough of it has gathered: every residual stays below the threshold.
Invariant:  what is sent is exact, and its magnitude is at least the threshold (which the decoder checks).
Reference:  Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015. Departs from it: the
            value is sent, where the paper sends +-threshold in one bit and leaves the rest in the residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.compress import sparse_format
from stretto.compress.backend import accelerated
from stretto.compress.checks import is_number
from stretto.compress.codec import Codec
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sparse_format import Chosen, Form
from stretto.errors import ConfigurationError, MalformedPayload

MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Threshold(Codec):
    """`value`: the least magnitude that is sent; it is compared in float32."""

    value: float
    wants_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _checked(self.value))

    def blocks(self, layout: Layout) -> Blocks:
        return layout.whole()

    def num_bytes(self, blocks: Blocks) -> None:
        return None

    def max_bytes(self, blocks: Blocks) -> int:
        return 4 * len(blocks) + 8 * blocks.num_elements

    def encode(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        return sparse_format.write(*at_least(values, _bits(self.value), blocks))

    def encode_residual(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        chosen, form = at_least(values, _bits(self.value), blocks)
        sparse_format.erase(chosen.places, values)
        return sparse_format.write(chosen, form)

    def decode(self, payload: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        return sparse_format.spread(self._read(payload, blocks), blocks.num_elements)

    def add_decoded(self, payload: Tensor, blocks: Blocks, random: RandomKeys, total: Tensor) -> None:
        sparse_format.add(self._read(payload, blocks), total)

    def _read(self, payload: Tensor, blocks: Blocks) -> Chosen:
        chosen = sparse_format.read(payload, _announced(payload, blocks))
        if bool((chosen.values.view(torch.int32) & MAGNITUDE < _bits(self.value)).any()):
            raise MalformedPayload("a value is below the threshold")
        return chosen


@accelerated(cpu="top_k_cpu.at_least")
def at_least(values: Tensor, floor: int, blocks: Blocks) -> tuple[Chosen, Form]:
    """All elements whose magnitude has at least these bits, and how they are written."""
    places = (values.view(torch.int32) & MAGNITUDE >= floor).nonzero().flatten()
    bounds, _ = blocks.on(values.device)
    return Chosen(places, values[places]), Form.listed(blocks, torch.searchsorted(places, bounds).diff().cpu())


def _announced(payload: Tensor, blocks: Blocks) -> Form:
    """The form that the counts at the beginning announce, if there can be such a one."""
    if len(payload) < 4 * len(blocks):
        raise MalformedPayload(f"{len(payload)} bytes do not hold {len(blocks)} counts")
    counts = sparse_format.unsigned(payload[: 4 * len(blocks)]).cpu()
    if bool((counts > blocks.lengths).any()):
        raise MalformedPayload("a count is larger than its tensor")
    return Form.listed(blocks, counts)


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))


def _checked(value: Any) -> float:
    if not is_number(value) or not 0 < value <= torch.finfo(torch.float32).max or _bits(value) == 0:
        raise ConfigurationError(
            f"Threshold({value!r}): the least magnitude that is sent is above 0 and finite, as float32 has it; with 0 everything "
            f"would be sent, with its index.\nWrite Threshold(1e-3), or NoCompression() to send everything."
        )
    return float(value)
