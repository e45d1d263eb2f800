"""Checkpointed activations of workers that share a GPU, in real processes."""

from __future__ import annotations

import pytest
import torch

from largest import largest
from mesh.workers import offloaded
from stretto.launching.spawn import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_what_is_kept_lies_in_host_memory_and_gradients_are_those_of_the_plain_model() -> None:
    for found in launch(offloaded, 2, "cuda", 8, 1 << 20, timeout_s=100):
        assert largest(distance for _, distance in found.values()) < 1e-5
        assert found["recomputed"][0] == pytest.approx(7 / 8, abs=0.05)  # the first block's is the program's
        assert found["offloaded"][0] == pytest.approx(0.0, abs=0.05)
        assert found["slices"][0] == pytest.approx(1 / 2, abs=0.05)
        assert found["slices, offloaded"][0] == pytest.approx(0.0, abs=0.05)
