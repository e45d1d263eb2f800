"""Resident memory of real processes beside their tensors, with arenas and without: M_D of ZeRO-R."""

from __future__ import annotations

import pytest

from aggregate.zero.workers import beside_tensors
from preloaded import Preloaded

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_process_holds_beside_its_tensors_can_be_given_back(stage: int, preloaded: Preloaded) -> None:
    """So little is lost to fragments. It is as little without arenas, of which `docs/large-models.md` has the figures."""
    with_arenas, without = (preloaded.launch(beside_tensors, 2, stage, arenas, 24, 6, timeout_s=180) for arenas in (True, False))
    for one, other in zip(with_arenas, without, strict=True):
        assert one["tensors"] > 90 and one["tensors"] == pytest.approx(other["tensors"], rel=0.05)
        assert one["beside, trimmed"] < 0.1 * one["tensors"]
        assert one["beside, trimmed"] < other["beside, trimmed"] + 4
