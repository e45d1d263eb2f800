"""What a run of the tests left out is listed at its end: by marker (deselected) and by reason (skipped).

Jobs of threads do not measure their links: `links_are_known`.

Hypothesis draws the same examples in every run, and nothing fails because it took long: a run on a busy machine must end as it
does on a quiet one. To look further, `pytest --hypothesis-profile=explore` draws others each time.

Under pytest-xdist the longest files are given out first, so that all workers end at about the same time; then a file that starts
processes beside one that only computes: while the first waits for its processes the other keeps the second core busy.
The Makefile turns off xdist's own order: most tests first.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import one_thread  # noqa: F401  # before anything else imports torch
from preloaded import Preloaded
from stretto.collectives.group import Group
from stretto.plan import auto
from stretto.plan.choose import Choices, choose
from stretto.plan.costs import LinkCosts

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("stretto", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("stretto")

HOW = {
    "slow": "run them with `make test-slow`",
    "gpu": "need a CUDA device",
    "root": "need root or user namespaces",
    "processes": "start real processes",
    "alone": "measure seconds or the machine",
}


LONGEST = (  # by seconds, as `pytest --durations=0` has them; the order of the others matters little
    "test_docs.py",
    "test_lossy.py",
    "test_launch.py",
    "test_laws.py",
    "test_introduce.py",
    "test_examples.py",
    "test_zeromq.py",
    "test_spawn.py",
    "test_checkpoint.py",
    "test_execute.py",
    "test_torch_group.py",
    "test_one_bit_adam.py",
    "test_interrupt.py",
    "test_costs.py",
    "test_plans.py",
    "test_processes.py",
    "test_joining.py",
    "test_libraries_of_torch.py",
    "test_torchs_own.py",
    "test_lab_command.py",
    "test_bench_command.py",
    "test_compressing.py",
    "test_zero.py",
    "test_cut.py",
    "test_compressed_slices.py",
    "test_lossy_servers.py",
    "test_groups_and_servers.py",
    "test_dedicated.py",
    "test_tensor_parallel.py",
    "test_mesh_processes.py",
    "test_whole_state.py",
)


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """A process that has imported torch and runs scripts in forks of itself."""
    process = Preloaded()
    yield process
    process.close()


@lru_cache
def _choices(size: int, segment_bytes: int, per_host: int) -> Choices:
    return choose(size, LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-10), segment_bytes, per_host)


@pytest.fixture(autouse=True)
def links_are_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`algorithm="auto"` chooses by the costs of some link, without measuring and trying out, which takes a short job longer than
    all else, and may come out differently in each. A test that is about the measuring asks for the fixture `measured_links`."""
    if "measured_links" not in request.fixturenames:
        monkeypatch.setattr(auto, "_make_choices", _choices_of)


def _choices_of(group: Group) -> Choices:
    return _choices(group.size, group.segment_bytes, group.workers_per_host)


@pytest.fixture
def measured_links() -> None:
    """Links are measured in this test, as in a job of processes."""


class LeftOut:
    """Counts what was deselected. Under pytest-xdist that happens in the workers, each of which selects among all tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.deselected: Counter[str] = Counter()
        self.is_half = "alone" in config.option.markexpr  # of `make test`: what the other half runs is not left out

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            names = [name for name in HOW if item.get_closest_marker(name) is not None]
            if "slow" in names or not self.is_half:
                self.deselected[names[0] if names else "other"] += 1

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["deselected"] = dict(self.deselected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.deselected = Counter(getattr(node, "workeroutput", {}).get("deselected", self.deselected))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
        if not (self.deselected or skipped):
            return
        terminalreporter.section("left out of this run")
        for name, count in sorted(self.deselected.items()):
            terminalreporter.line(f"{count} {name}: {HOW.get(name, 'deselected on the command line')}")
        for reason, count in sorted(skipped.items()):
            terminalreporter.line(f"{count} {reason}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    longest = sorted((path for path in files if path.name in LONGEST), key=lambda path: LONGEST.index(path.name))
    first = [files.pop(path) for path in longest]
    waiting = [file for file in files.values() if any(item.get_closest_marker("processes") for item in file)]
    computing = [file for file in files.values() if file not in waiting]
    pairs = zip_longest(waiting, computing)
    items[:] = [item for file in [*first, *(file for pair in pairs for file in pair)] if file is not None for item in file]


def pytest_configure(config: pytest.Config) -> None:
    """Some runners start the tests with SIGINT ignored, which processes inherit: a test that sends Ctrl-C would wait for ever."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(LeftOut(config), "stretto-left-out")
