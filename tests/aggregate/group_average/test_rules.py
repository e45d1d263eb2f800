"""The two rules of WAGMA, in time, late, alone and after a round of all, with the numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.aggregate.group_average.machine import RoundAverage
from stretto.aggregate.group_average.rules import merge
from stretto.aggregate.group_average.value import GroupAverage, Rule

BEFORE, STEPPED = np.array([2.0], np.float32), np.array([5.0], np.float32)  # the step is 3


@pytest.mark.parametrize(
    ("rule", "contributors", "is_included", "is_global", "expected"),
    [
        ("paper", 3, True, False, 12 / 3),
        ("paper", 3, False, False, (12 + 5) / 4),
        ("paper", 1, True, False, 5),
        ("paper", 1, False, False, 5),
        ("paper", 4, True, True, 12),  # the machine has divided it
        ("code", 3, True, False, (12 + 2) / 4 + 3),
        ("code", 3, False, False, (12 + 2) / 4 + 3),
        ("code", 1, True, False, 5),
        ("code", 4, True, True, 12),
    ],
)
def test_what_becomes_of_a_model(rule: Rule, contributors: int, is_included: bool, is_global: bool, expected: float) -> None:
    total = np.array([12.0], np.float32)
    average = RoundAverage(total, frozenset(range(contributors)), is_included, is_global, 7, 0)
    assert merge(rule, average, BEFORE, STEPPED) == pytest.approx([expected])
    assert [total[0], BEFORE[0], STEPPED[0]] == [12.0, 2.0, 5.0], "nothing that was given is written to"


def test_the_papers_rule_is_the_default() -> None:
    assert GroupAverage(4).rule == "paper"
