"""Messages that carry fewer bytes: an all-reduce whose every message is encoded by its sender and decoded by its receiver.

The float32 vector is cut into units of `codec.unit` elements, counted from element 0 (the last may be shorter), and a message is
a whole number of them. With Q = decode . encode, acting on each unit by itself:

    send             Q's payload of the range                 codec.encode
    receive, add     mine <- mine + Q(theirs)                 codec.add
    receive, copy    mine <- Q(theirs)                        codec.copy
    the last add     mine <- Q(scale * (mine + Q(theirs)))    the same, then codec.settle; scale = 1/P for a mean

Cost:      codec.num_bytes(n) in place of 4n bytes wherever a plan sends n elements. A contribution that is summed over k hops is
           quantised with what is added to it at each of them, and the result once more: k + 1 roundings of the running sum.
Invariant: all ranks end with the same bits. It takes a plan that completes each element at one rank, after which it is only
           copied (`COMPLETED_ONCE`, a list that tests/collectives/test_message_codec.py proves on symbols). That rank keeps
           Q(sum), and Q(Q(x)) = Q(x) to the bit, so however often it is forwarded, and with whatever other units in one
           message, it arrives as it left. Where several ranks complete an element, each has its own term unquantised, and
           they differ.
One rank:  nothing is sent, so nothing is quantised.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.collectives.plan import Kind, Plan
from stretto.collectives.reduction import Accumulator
from stretto.errors import ConfigurationError

COMPLETED_ONCE: Final = (
    "ring", "halving_doubling", "direct", "torus", "hierarchical", "bidirectional_ring", "double_binary_tree", "binomial_tree",
    "chain", "master_worker",
)  # fmt: skip


class MessageCodec(Protocol):
    """How a range of whole units travels. A frozen, hashable value; its repr, which ranks compare, says all there is to it.

    Laws, for `count` elements from the start of a unit on:
    - a payload is `num_bytes(count)` bytes, whatever the values; `num_bytes(0) == 0`;
    - a unit is encoded by itself: what it decodes to does not depend on its neighbours in the message;
    - encode(decode(payload)) == payload, to the bit, for every payload that `encode` writes;
    - `add` and `copy` raise `MalformedPayload` for bytes that no `encode` writes; `encode` and `settle` take any float32 values,
      also those that are not finite, and do not raise.

    Payloads lie at any address, and may be read-only; `values` is changed in place. The communication thread calls all of this.
    """

    @property
    def unit(self) -> int:
        """How many consecutive elements are encoded together; at least 1."""

    def __hash__(self) -> int:
        """Schedules are kept by it."""

    def num_bytes(self, count: int) -> int:
        """The length of the payload of `count` elements."""

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
        """Write the payload of `values` to `out`, all of it."""

    def add(self, payload: NDArray[np.uint8], values: NDArray[np.float32]) -> None:
        """values += decode(payload)."""

    def copy(self, payload: NDArray[np.uint8], values: NDArray[np.float32]) -> None:
        """values = decode(payload)."""

    def settle(self, values: NDArray[np.float32]) -> None:
        """values = decode(encode(values)): what everybody else will hold."""


def check_message_codec(codec: MessageCodec, plan: Plan, op: str, dtype: torch.dtype) -> None:
    """Refuse what encoded messages cannot be part of, before anything is sent."""
    asked = f"{plan.kind.value} by {plan.algorithm!r} with message_codec={codec!r}"
    if plan.kind is not Kind.ALL_REDUCE:
        raise ConfigurationError(
            f"{asked}: it encodes sums on their way, and only an all-reduce is known to leave the same bits on all ranks.\n"
            f"Leave the codec out, or ask for an all_reduce."
        )
    if plan.algorithm not in COMPLETED_ONCE:
        raise ConfigurationError(
            f"{asked}: several ranks complete the same element, each with its own contribution as it is and those of others "
            f"quantised, so they would end with different bits.\nWrite one of: {', '.join(COMPLETED_ONCE)}."
        )
    if op not in ("sum", "mean"):
        raise ConfigurationError(f"{asked}, op={op!r}: it adds what arrives. Use op='sum' or 'mean', or leave it out.")
    if dtype is not torch.float32:
        raise ConfigurationError(f"{asked} of {dtype}: it encodes float32. Convert the tensor, or leave the codec out.")


class EncodedAccumulator(Accumulator):
    """A float32 buffer that is sent, and added to, in a codec's encoding. Ranges are whole units, in elements."""

    def __init__(self, flat: torch.Tensor, op: str, scale: float | None, codec: MessageCodec) -> None:
        super().__init__(flat, op, scale)
        self._values: NDArray[np.float32] = self.raw.view(np.float32)
        self._codec = codec

    def num_bytes(self, start: int, stop: int) -> int:
        return self._codec.num_bytes(stop - start)

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """A new payload. It lives as long as the view of it, which the wire holds until it has sent it."""
        payload = np.empty(self.num_bytes(start, stop), np.uint8)
        self._codec.encode(self._values[start:stop], payload)
        return payload.data

    def place(self, start: int, stop: int) -> memoryview | None:
        return None  # what arrives has to be decoded

    def copy_in(self, start: int, stop: int, incoming: memoryview) -> None:
        self._codec.copy(np.frombuffer(incoming, np.uint8), self._values[start:stop])

    def combine(self, start: int, stop: int, incoming: memoryview, *, final: bool, arrived_first: bool = False) -> None:
        """One rank completes each element, so which operand comes first (`arrived_first`) makes no rank differ from another."""
        values = self._values[start:stop]
        with np.errstate(all="ignore"):  # an overflow is an infinity, as without a codec
            self._codec.add(np.frombuffer(incoming, np.uint8), values)
            if final:
                if self.scale is not None:
                    np.multiply(values, np.float32(self.scale), out=values)
                self._codec.settle(values)
