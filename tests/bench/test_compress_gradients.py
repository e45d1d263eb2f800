"""The values that codecs are measured on."""

from __future__ import annotations

import pytest
import torch

from stretto.bench.compress_gradients import KINDS, layout_of, values_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_elements", [1, 2, 3, 6, 25, 1000, 1 << 18, 1 << 24, (1 << 24) + 77])
def test_every_element_belongs_to_a_tensor_and_large_vectors_are_mostly_matrices(num_elements: int) -> None:
    layout = layout_of(num_elements)

    assert layout.num_elements == num_elements and all(place.size > 0 for place in layout.places)
    assert len({place.name for place in layout.places}) == len(layout.places)
    if num_elements >= 1000:
        assert sum(place.size for place in layout.places if len(place.shape) == 2) > 0.9 * num_elements


def test_64_mb_are_square_matrices_with_their_biases() -> None:
    shapes = [place.shape for place in layout_of(1 << 24).places]

    assert shapes[:4] == [(1024, 1024), (1024,), (1024, 1024), (1024,)]


@pytest.mark.parametrize("kind", KINDS)
def test_values_have_a_mean_square_of_1_and_a_seed_fixes_them(kind: str) -> None:
    layout = layout_of(1 << 16)
    values = values_of(kind, layout, 3, CPU)

    assert float(values.square().mean()) == pytest.approx(1, abs=0.02)
    assert torch.equal(values, values_of(kind, layout, 3, CPU))
    assert not torch.equal(values, values_of(kind, layout, 4, CPU))


def test_gradient_like_values_have_heavy_tails_and_few_strong_directions() -> None:
    layout = layout_of(1 << 16)
    normal, heavy = (values_of(kind, layout, 0, CPU) for kind in KINDS)
    matrix = layout.places[0]

    def in_8_directions(values: torch.Tensor) -> float:
        strengths = torch.linalg.svdvals(values[matrix.start : matrix.stop].view(matrix.shape)).square()
        return float(strengths[:8].sum() / strengths.sum())

    assert float(heavy.pow(4).mean()) > 5 * float(normal.pow(4).mean())
    assert in_8_directions(heavy) > 0.6 > 0.3 > in_8_directions(normal)
