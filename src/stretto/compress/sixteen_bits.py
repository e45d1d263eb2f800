"""What `Float16` and `BFloat16` have in common: payloads of 16 bits per value, which add up."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress.codec import KernelCodec
from stretto.compress.layout import Blocks, Layout
from stretto.errors import MalformedPayload


class SixteenBits(KernelCodec):
    """n numbers of `payload_dtype`, little-endian."""

    __slots__ = ()
    payload_dtype: ClassVar[torch.dtype]

    @property
    @abstractmethod
    def limit_bits(self) -> int:
        """The largest magnitude that is sent, as the bits of a float32."""

    def blocks(self, layout: Layout) -> Blocks:
        return layout.whole()

    def num_bytes(self, blocks: Blocks) -> int:
        return 2 * blocks.num_elements

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor:
        numbers = halves_of(payload, blocks).view(self.payload_dtype)
        # A sum in float64 of finite 16-bit numbers is finite, however many they are; of others it is not.
        refuse_if(not math.isfinite(numbers.sum(dtype=torch.float64)))
        return numbers.float()


def halves_of(payload: Tensor, blocks: Blocks) -> Tensor:
    """As int16."""
    if len(payload) != 2 * blocks.num_elements:
        raise MalformedPayload(
            f"{len(payload)} bytes where {blocks.num_elements} values of 16 bits need {2 * blocks.num_elements}"
        )
    return (payload if payload.storage_offset() % 2 == 0 else payload.clone()).view(torch.int16)


def refuse_if(not_finite: bool) -> None:
    if not_finite:
        raise MalformedPayload("a value of 16 bits that is not finite")
