"""How many bytes a bucket gets where the user does not say."""

from __future__ import annotations

import pytest

from stretto.plan.profile import TransferCost
from stretto.plan.transfers import Gradient
from stretto.schedule.bucket_size import LARGEST_BYTES, LEAST_BYTES, bucket_bytes
from stretto.schedule.orders import Buckets

MODEL = [Gradient(f"layer{i}", 1 << 20) for i in range(64)]


def cost(mbit: float, start_ms: float) -> TransferCost:
    """Between four workers."""
    return TransferCost(start_s=start_ms * 1e-3, per_byte_s=1.5 * 8 / (mbit * 1e6))


def test_sizes_follow_the_network() -> None:
    by_rate = [bucket_bytes(MODEL, cost(mbit, 1.0)) for mbit in (10, 100, 1000, 10_000, 100_000, 1_000_000)]
    assert by_rate == sorted(by_rate) and len(set(by_rate)) >= 4
    by_start = [bucket_bytes(MODEL, cost(1000, start_ms)) for start_ms in (0.0, 0.1, 1.0, 10.0, 1000.0)]
    assert by_start == sorted(by_start) and by_start[0] <= 1 << 20 and by_start[-1] >= 64 << 20


def test_two_measurements_that_differ_a_little_give_the_same_size() -> None:
    sizes = {bucket_bytes(MODEL, cost(1000 * (1 + wrong), 1.0 - wrong)) for wrong in (-0.05, -0.02, 0.0, 0.02, 0.05)}
    assert len(sizes) == 1


def test_sizes_are_within_reason_for_any_model() -> None:
    for gradients in ([], MODEL[:1], [Gradient("huge", 1 << 40)], [Gradient(f"p{i}", 4) for i in range(3000)]):
        for network in (cost(1, 100.0), cost(1e6, 0.001), *(TransferCost(start_s=0.0, per_byte_s=b) for b in (1e-12, 0.0))):
            assert LEAST_BYTES <= bucket_bytes(gradients, network) <= LARGEST_BYTES


def test_only_what_is_left_to_us_is_filled_in() -> None:
    network = cost(1000, 1.0)
    sized = Buckets().sized(MODEL, network)
    assert sized.bytes == bucket_bytes(MODEL, network) != 25 << 20
    first = Buckets(first_bytes=5000).sized(MODEL, network)
    assert first == Buckets(bytes=bucket_bytes(MODEL, network, 5000), first_bytes=5000)
    assert Buckets(bytes=7).sized(MODEL, network) == Buckets(bytes=7)
    by_us, by_hand = Buckets().plan(MODEL, None), Buckets(bytes=25 << 20, first_bytes=1 << 20).plan(MODEL, None)
    assert by_us.transfers == by_hand.transfers


@pytest.mark.parametrize("mbit", [30, 300, 3000])
def test_no_power_of_two_is_better_by_more_than_a_little_whatever_backward_takes(mbit: float) -> None:
    """By the recurrence, written once more: nothing but the link and readiness in proportion to bytes."""
    network, total = cost(mbit, 1.0), 64 << 20

    def step(size: int, backward_s: float) -> float:
        end, sent = 0.0, 0
        for transfer in Buckets(bytes=size).plan(MODEL, None).transfers:
            sent += transfer.num_bytes
            end = max(end, backward_s * sent / total) + network.seconds(transfer.num_bytes)
        return end + backward_s / 2

    chosen = bucket_bytes(MODEL, network)
    for rho in (0.25, 0.5, 1.0, 2.0, 4.0):
        backward_s = total * network.per_byte_s / rho
        assert step(chosen, backward_s) <= 1.05 * min(step(1 << k, backward_s) for k in range(18, 28))
