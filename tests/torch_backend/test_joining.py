"""`init_process_group("stretto")`: which job it joins, under launchers and without, before and after `stretto.init()`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from preloaded import Preloaded
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.int8 import Int8
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.sign import Sign
from stretto.errors import ConfigurationError
from stretto.torch_backend.options import GroupOptions
from torch_backend import joins, losing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_importing_stretto_imports_no_torch_and_tells_it_later() -> None:
    program = (
        "import sys, stretto; assert 'torch' not in sys.modules and 'stretto.api' not in sys.modules\n"
        "import torch.distributed as dist; assert 'STRETTO' in dist.Backend._plugins and 'stretto.api' not in sys.modules\n"
        "of = dist.Backend.default_device_backend_map; assert of['cpu'] == 'gloo' and of['cuda'] == 'nccl'\n"
        "assert not [finder for finder in sys.meta_path if 'stretto' in type(finder).__module__]\n"
        "import inspect; assert 'def init_process_group' in inspect.getsource(dist.distributed_c10d)\n"
        "import importlib; assert dist.__spec__.loader.exec_module.__func__ is not None\n"
        "try: dist.init_process_group('gloo')\n"
        "except ValueError as error: assert 'RANK expected' in str(error), error\n"
        "else: raise SystemExit('torch must fail as ever')\n"
    )
    environ = {"PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_launcher_says_which_job(preloaded: Preloaded) -> None:
    results = preloaded.launch(joins.by_launcher, 3)
    for rank, report in enumerate(results):
        assert report["first"] == report["again"] == 9 and report["rank"] and report["patience"] == 50
        assert report["still in the job"]
        assert report.get("sub") == (6 if rank < 2 else None) and report.get("options") in (("ring", 7.0), None)
        assert report["split"] == ((2, "two", 50, 6.0) if rank else None)


def test_a_job_that_was_joined_before_is_the_one(preloaded: Preloaded) -> None:
    for report in preloaded.launch(joins.after_init, 2):
        assert "would name workers differently" in report["refusal"] and "in time" in report["no time"]
        assert report["inherited"] == ["ring", None]
        assert report["sum"] == 8 and report["by its own method"] == report["gloo beside it"] == 6


def test_rank_size_and_a_store_suffice(preloaded: Preloaded, tmp_path: Path) -> None:
    [results] = preloaded.launch(joins.by_store, 1, 3, str(tmp_path))
    for rank, report in enumerate(results):
        assert report == [(9.0, 3, rank), False, (9.0, 3, rank), False, 9.0, (9.0, rank)]


def test_a_process_by_itself_is_a_job_of_one(preloaded: Preloaded) -> None:
    [[error, total, size, refusal]] = preloaded.launch(joins.single, 1)
    assert "RANK" in error and (total, size) == (3, 1)
    assert "torch uses 'stretto' for all devices, not cuda:gloo" in refusal


@pytest.mark.parametrize(
    "what", ["fsdp2", "ddp", "pipeline", "tensor parallel", pytest.param("ddp with a hook", marks=pytest.mark.slow)]
)
def test_a_worker_killed_in_the_middle_is_named_by_all_others_in_two_seconds(
    what: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    [results] = preloaded.launch(losing.lose_one_of, 1, 4, "stretto", what, str(tmp_path), timeout_s=200)
    assert {rank: text for rank, (text, _) in results.items()} == dict.fromkeys((0, 2, 3), "PeerLost 1")
    assert max(seconds for _, seconds in results.values()) < 2, results


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pipeline", "tensor parallel"])
def test_on_gloo_nobody_learns_which_worker_was_killed_and_some_learn_nothing(
    what: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    """What the page says of gloo: it tells those that are connected to the dead worker, and the others wait for each other."""
    [results] = preloaded.launch(losing.lose_one_of, 1, 4, "gloo", what, str(tmp_path), 10.0, timeout_s=200)
    assert results and 3 not in results, results  # it exchanges with ranks 0 and 2 only
    assert all("PeerLost" not in text and "rank 1" not in text for text, _ in results.values()), results


def test_options_that_cannot_work_are_refused() -> None:
    for compression in (ErrorFeedback(Sign()), Sign(), PowerSGD(2), "int8"):
        with pytest.raises(ConfigurationError, match="GroupOptions"):
            GroupOptions(compress=compression)  # type: ignore[arg-type]
    for algorithm in ("no such", "transpose"):
        with pytest.raises(ConfigurationError, match="there is no such algorithm"):
            GroupOptions(algorithm=algorithm)
    with pytest.raises(ConfigurationError, match="Leave algorithm out"):
        GroupOptions(algorithm="butterfly", compress=Int8())
