"""Tests marked `root` need namespaces: as root, or with user namespaces. Elsewhere they are skipped with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from stretto.lab import lab_available


@pytest.fixture(scope="session")
def lab_problem() -> str | None:
    return lab_available()


@pytest.fixture(autouse=True)
def _skip_without_namespaces(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("root") is not None:
        problem = request.getfixturevalue("lab_problem")
        if problem is not None:
            pytest.skip(problem)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait for what must come true, however busy the machine: the limit is there to end a test that fails."""

    def wait(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"did not come true within {timeout_s} s"
            time.sleep(0.02)

    return wait
