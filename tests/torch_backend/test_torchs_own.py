"""The tests that torch ships for its backends: all that gloo passes are run against ours, some of them quickly.

`passed_by_gloo.txt` has the names of those that pass on gloo with torch 2.13 and four workers, where there is no GPU. Each passes
on our backend too, or stands in `DIFFERENT` with the reason, and must fail then. `kept_for_mpi.txt` has those for the CPU that
torch skips, by name, for every backend but MPI: those of all-to-all.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preloaded import Preloaded

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
PASSED_BY_GLOO = (HERE / "passed_by_gloo.txt").read_text().split()
KEPT_FOR_MPI = (HERE / "kept_for_mpi.txt").read_text().split()
DIFFERENT = {
    "test_barrier_timeout_full_group": "looks for gloo's words; ours name the rank that is late, and what it does instead",
    "test_monitored_barrier_gloo": "looks for gloo's words on the ranks that came; here they raise what rank 0 does",
}
QUICK = (
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook", "test_all_gather_coalesced_simple",
    "test_batch_isend_irecv_gloo_tags", "test_gather", "test_get_future", "test_reduce_max", "test_scatter_object_list",
    "test_send_recv_any_source",
)  # fmt: skip


def outcomes(
    preloaded: Preloaded, folder: Path, imported_as: str, size: int, names: list[str], timeout_s: int
) -> dict[str, tuple[str, str]]:
    results = folder / "results"
    arguments = ("stretto", imported_as, size, results, *names)
    done = preloaded.run(HERE / "torchs_own_tests.py", *arguments, folder=folder, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, results.read_text().splitlines())
    return {line["test"]: (line["outcome"], line["why"]) for line in lines}


def test_some_of_torchs_own_tests_pass(preloaded: Preloaded, tmp_path: Path) -> None:
    assert set(QUICK) <= set(PASSED_BY_GLOO)
    found = outcomes(preloaded, tmp_path, "gloo", 2, list(QUICK), 280)
    assert {name: why for name, (outcome, why) in found.items() if outcome != "passed"} == {} and len(found) == len(QUICK)


@pytest.mark.slow
def test_all_of_torchs_own_tests_that_gloo_passes_pass(preloaded: Preloaded, tmp_path: Path) -> None:
    found = outcomes(preloaded, tmp_path, "gloo", 4, PASSED_BY_GLOO, 800)
    failed = {name: why for name, (outcome, why) in found.items() if outcome != "passed"}
    assert found.keys() == set(PASSED_BY_GLOO) and len(found) > 80
    assert failed.keys() == DIFFERENT.keys(), {name: why[-1500:] for name, why in failed.items() if name not in DIFFERENT}


@pytest.mark.slow
def test_torchs_own_tests_of_all_to_all_pass(preloaded: Preloaded, tmp_path: Path) -> None:
    found = outcomes(preloaded, tmp_path, "mpi", 4, KEPT_FOR_MPI, 280)
    assert {name: why for name, (outcome, why) in found.items() if outcome != "passed"} == {}
    assert found.keys() == set(KEPT_FOR_MPI) and len(found) == 12
