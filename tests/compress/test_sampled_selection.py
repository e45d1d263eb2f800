"""The k largest by a sampled threshold: never more than k, hardly fewer than 0.8 k, and the largest ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.compress import sampled_selection
from stretto.compress.sampled_selection import count_reaching, reaching, select_largest


def assert_largest(values: Tensor, chosen: Tensor, k: int) -> None:
    assert len(chosen) <= k
    assert (chosen.diff() > 0).all()
    assert values[chosen].all(), "zeros are selected"
    rest = values.clone()
    rest[chosen] = 0
    if len(chosen):
        assert values[chosen].abs().min() >= rest.abs().max()


def vectors(kind: str, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, generator=generator)
    return {
        "normal": normal,
        "heavy tails": normal**5,
        "columns": normal * (torch.arange(n) % 64 == 3) + 0.01 * normal,
        "rising": torch.arange(1, n + 1) / n,
    }[kind]


@pytest.mark.parametrize("density", [0.25, 0.01, 0.001])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "columns", "rising"])
def test_the_number_is_within_the_tolerance(kind: str, density: float) -> None:
    n = 100_000
    k = int(density * n)
    for seed in range(5):
        values = vectors(kind, n, seed)
        chosen = select_largest(values, k, key=seed * 77)
        assert_largest(values, chosen, k)
        assert len(chosen) >= 0.8 * k


def test_few_values_are_sorted() -> None:
    values = vectors("normal", 1000, 0)
    chosen = select_largest(values, 10, key=1)
    assert chosen.tolist() == values.abs().topk(10).indices.sort().values.tolist()


@pytest.mark.parametrize("n", [1, 2, 20, 50_000])
@pytest.mark.parametrize("k", [1, 2, 50])
def test_awkward_vectors(n: int, k: int) -> None:
    k = min(k, n)
    assert len(select_largest(torch.zeros(n), k, key=5)) == 0
    assert len(select_largest(torch.full((n,), -2.5), k, key=5)) == k
    assert len(select_largest(torch.full((n,), 1e-45), k, key=5)) == k
    one_hot = torch.zeros(n)
    one_hot[n // 2] = -3e38
    assert select_largest(one_hot, k, key=5).tolist() == [n // 2]


def test_the_start_of_the_sample_is_drawn() -> None:
    """Values that only one start in `stride` meets: some keys see them, some do not."""
    values = vectors("normal", 100_000, 3)
    found = {len(select_largest(values, 100, key=key)) for key in range(20)}
    assert len(found) > 1
    assert torch.equal(select_largest(values, 100, key=7), select_largest(values, 100, key=7))


@pytest.mark.parametrize(("n", "k"), [(1 << 16, 655), (1 << 18, 2621), (100_000, 100)])
def test_the_sample_is_as_large_as_promised_and_meets_all_columns(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is large lies in one column of 64. Every 64th value (of 65,536) would be in that column always or never; then
    the threshold is far off, and far more is collected, or less, than is asked for."""
    topk, largest_of = torch.topk, sampled_selection._largest_of
    sampled: list[int] = []
    collected: list[int] = []

    def watch_topk(values: Tensor, *arguments: Any, **options: Any) -> Any:
        sampled.append(len(values))
        return topk(values, *arguments, **options)

    def watch_largest(values: Tensor, positions: Tensor, k: int) -> Tensor:
        collected.append(len(positions))
        monkeypatch.setattr(torch, "topk", topk)  # the sample's comes first
        return largest_of(values, positions, k)

    monkeypatch.setattr(sampled_selection, "_largest_of", watch_largest)
    values = vectors("columns", n, 1)
    for key in range(8):
        monkeypatch.setattr(torch, "topk", watch_topk)
        select_largest(values, k, key)
    wanted = max(0.01 * n, 1024, 8 * n / k)
    assert len(sampled) == 8 and all(0.95 * wanted < each < 1.05 * wanted for each in sampled)
    assert all(0.7 * k < each < 2 * k for each in collected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), max_size=200), st.sampled_from([0.0, 1e-45, 0.5, 1.0, 4.0, 5.0]))
def test_kernel_and_reference_agree(values: list[float], threshold: float) -> None:
    x, least = torch.tensor(values), torch.tensor([threshold])
    expected = reaching.reference(x, least)
    assert torch.equal(reaching(x, least), expected)
    assert count_reaching(x, least) == len(expected)
