"""Tensor parallelism in processes: random numbers and memory. (A worker that dies in a layer: tests/test_faults.py.)"""

from __future__ import annotations

import pytest
import torch

from largest import largest
from mesh.models import build, loss_of, sgd, train, words
from mesh.workers import block_bytes, cut_and_train, masks, recompute_with_dropout, stored_bytes
from preloaded import Preloaded

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_dropout_is_the_same_outside_of_what_is_cut_and_another_inside(preloaded: Preloaded) -> None:
    first, second = preloaded.launch(masks, 2)

    assert len(first["inside"]) == 4 and len(first["outside"]) == 8
    assert first["outside"] == second["outside"] and first["generator"] == second["generator"]
    for one, other in zip(first["inside"], second["inside"], strict=True):
        alike = sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
        assert 0.4 < alike < 0.9  # half of the elements, and those above the diagonal
    for where in ("inside", "outside"):
        assert len({tuple(mask) for mask in first[where]}) == len(first[where])


def test_a_recomputation_drops_what_was_dropped_before(preloaded: Preloaded) -> None:
    for differences in preloaded.launch(recompute_with_dropout, 2):
        assert largest(differences) < 1e-6


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_kept_of_activations_is_shared_out(preloaded: Preloaded, size: int) -> None:
    """Of N workers each keeps 1/N of what a block begins with."""
    for found in preloaded.launch(stored_bytes, size, 8, 1 << 20):
        assert found["kept"] > 2.9
        assert found["recomputed"] == pytest.approx(7 / 8, abs=0.05)  # the first block's is the program's
        assert found["first slices"] == pytest.approx(1 / size, abs=0.05)
        assert found["slices"] == pytest.approx(1 / size, abs=0.05)  # in an arena that was laid out for them


def test_processes_train_as_one_does(preloaded: Preloaded) -> None:
    model = build("gpt2")
    train(model, sgd(model), [words(step) for step in range(4)])
    with torch.no_grad():
        expected = loss_of(model, words(4)).item()
    assert preloaded.launch(cut_and_train, 4, 4) == pytest.approx([expected] * 4, abs=1e-5)


@pytest.mark.slow  # imports DTensor
def test_what_goes_into_q_k_and_v_is_summed_once(preloaded: Preloaded) -> None:
    """Four all-reduces of the activation for a block; torch's plan has six, for each of the three maps sums its own gradient."""
    activation = 256 * 768 * 4  # of two workers each sends as many bytes in an all-reduce
    for found in preloaded.launch(block_bytes, 2, 256, 768):
        torch.testing.assert_close(found["ours, gradient"], found["torch, gradient"], rtol=1e-4, atol=1e-8)
        assert found["ours"] == 4 * activation  # 3.15 MB
        assert found["torch"] == 6 * activation  # 4.72 MB
