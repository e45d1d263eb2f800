"""save and load: the same bits as never having stopped, or an error on all ranks and nothing changed."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import random
import resource
import secrets
import subprocess
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import stretto
from engine.worker import Refusing
from preloaded import Preloaded
from resumable_training import RING, Net, Training
from stretto import checkpoint, checkpoint_file, plain_values, random_state
from stretto.checkpoint import load, save
from stretto.collectives import calls
from stretto.distributing import distribute, engine_of, weight
from stretto.engine.engine import Engine
from stretto.errors import CheckpointError, ConfigurationError
from stretto.job import Job
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.sampler import Sampler
from stretto.strategy import Strategy
from stretto.testing import run_jobs

ROOT = Path(__file__).parents[1]
SIZES = [1, 2, 3, 4, 7]


def raised(action: Callable[[], Any], kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def saved(path: Path, size: int = 2, steps: int = 3, **options: Any) -> Path:
    run_jobs(size, lambda job: Training(job, **options).run(steps).save(path, extra={"step": steps}))
    return path


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_saving_and_resuming_gives_the_same_bits_as_never_having_stopped(size: int, buffers: str, tmp_path: Path) -> None:
    """Seven workers reach the end of the first epoch on the way."""
    path = tmp_path / "c.pt"

    def resume(job: Job) -> Any:
        training = Training(job, buffers=buffers)
        resumed = training.load(path)
        assert resumed.extra == {"step": 3} and resumed.world_size == size and resumed.lost == ()
        return training.run(5).bits

    expected = run_jobs(size, lambda job: Training(job, buffers=buffers).run(8).bits)
    saved(path, size, buffers=buffers)
    assert run_jobs(size, resume) == expected


@pytest.mark.usefixtures("measured_links")
def test_what_auto_chose_and_each_workers_weight_are_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"

    def begin(job: Job) -> Any:
        training = Training(job, strategy="Strategy()").run(1)
        weight(job.rank + 2.0, job=job)
        training.save(path)
        return job.choices

    def resume(job: Job) -> Any:
        training = Training(job, strategy="Strategy()")
        job.choices = None
        assert "what `auto` chose" in training.load(path).carried
        assert job.weight == job.rank + 2.0
        return job.choices

    chosen = run_jobs(3, begin)
    assert chosen[0] is not None
    assert run_jobs(3, resume) == chosen


def wide_model(job: Job, link: LinkCosts) -> tuple[nn.Module, Optimizer, Engine]:
    """In buckets that follow such links."""
    job.choices = Choices([1 << 40], ["ring"], link)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distribute(model, optimizer, Strategy(), job=job)
    return model, optimizer, engine_of(model)


def test_after_a_backward_that_failed_at_another_layer_on_each_worker_a_saved_state_can_be_loaded(tmp_path: Path) -> None:
    """The round that is open has sent some buckets: it is closed before they are arranged anew."""
    path = tmp_path / "c.pt"

    def program(job: Job) -> list[float]:
        model, optimizer, _ = wide_model(job, LinkCosts(1e-5, 1e-6))
        save(path, model, optimizer, job=job)
        layers, x = list(model.children()), torch.ones(2, 300)
        for number, layer in enumerate(layers):
            x = layer(x)
            if number == 1 + 2 * job.rank:
                x = Refusing.apply(x)  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="cannot go on"):
            torch.autograd.backward(x.sum())
        job.choices = Choices([1 << 40], ["ring"], LinkCosts(1e-1, 1e-12))
        load(path, model, optimizer, job=job)
        for _ in range(2):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [float(parameter.detach().sum()) for parameter in model.parameters()]

    first, second = run_jobs(2, program)
    assert first == second


def test_what_is_loaded_for_one_model_arranges_the_others_too(tmp_path: Path) -> None:
    path, slow, fast = tmp_path / "c.pt", LinkCosts(1e-5, 1e-6), LinkCosts(1e-1, 1e-12)

    def program(job: Job) -> list[int]:
        model, optimizer, engine = wide_model(job, slow)
        save(path, model, optimizer, job=job)
        _, _, other = wide_model(job, fast)
        before = len(other.places.buckets)
        load(path, model, optimizer, job=job)
        return [before, len(engine.places.buckets), len(other.places.buckets)]

    assert run_jobs(2, program, hosts=("a", "b")) == [[2, 6, 6]] * 2


def test_buckets_that_follow_the_network_are_those_of_the_saved_job(tmp_path: Path) -> None:
    """A network that is measured otherwise would give other buckets, hence another order of additions."""
    path, slow, fast = tmp_path / "c.pt", LinkCosts(1e-5, 1e-6), LinkCosts(1e-1, 1e-12)

    def first(job: Job) -> int:
        model, optimizer, engine = wide_model(job, slow)
        save(path, model, optimizer, job=job)
        return len(engine.places.buckets)

    def resume(job: Job) -> tuple[int, int]:
        model, optimizer, engine = wide_model(job, fast)
        before = len(engine.places.buckets)
        resumed = load(path, model, optimizer, job=job)
        assert resumed.lost == () and "what `auto` chose" in resumed.carried
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        return before, len(engine.places.buckets)

    saved_buckets = set(run_jobs(2, first, hosts=("a", "b")))
    assert set(run_jobs(2, resume, hosts=("a", "b"))) == {(2, count) for count in saved_buckets} and min(saved_buckets) > 2


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (4, 1), (1, 3)])
def test_resuming_with_another_number_of_workers_goes_on_with_the_same_samples(
    before: int, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve samples a step however many workers share them: the same training, up to the order of addition."""
    path = saved(tmp_path / "c.pt", before, steps=4, plain=True, batch=12 // before)

    def resume(job: Job) -> Any:
        training = Training(job, plain=True, batch=12 // after)
        resumed = training.load(path)
        return training.run(4).weights, resumed

    with caplog.at_level(logging.INFO, "stretto"):
        results = run_jobs(after, resume)
    [expected] = run_jobs(1, lambda job: Training(job, plain=True, batch=12).run(8).weights)
    for weights, resumed in results:
        assert_close(weights, expected)
        assert resumed.world_size == before
        assert resumed.carried == ("model", "optimizer", "the place in the data (epoch 0)")
        assert [f"then {before} workers, now {after}" in each for each in resumed.lost] == [True]
    assert f"then {before} workers, now {after}" in caplog.text


def assert_close(weights: list[list[float]], expected: list[list[float]]) -> None:
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


RunScript = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_script(preloaded: Preloaded, tmp_path: Path) -> RunScript:
    """run_script(num_workers, *arguments): `resumable_training.py` in so many processes."""

    def run(num_workers: int, *arguments: object) -> subprocess.CompletedProcess[str]:
        script = ROOT / "tests" / "resumable_training.py"
        return preloaded.run(script, *arguments, folder=tmp_path, workers=num_workers, timeout_s=100)

    return run


def kill(run_script: RunScript, num_workers: int, path: Path, kind: str) -> None:
    killed = run_script(num_workers, path, 9, kind, 3)
    assert killed.returncode != 0 and killed.stdout == ""
    assert "SIGKILL" in killed.stderr


@pytest.mark.processes
def test_processes_that_are_killed_after_saving_resume_to_the_same_bits(tmp_path: Path, run_script: RunScript) -> None:
    """Over an epoch's end, with dropout, numpy's and Python's random numbers, which every process has of its own."""
    expected = run_script(2, tmp_path / "absent.pt", 9, "noisy")
    assert expected.returncode == 0, expected.stderr

    kill(run_script, 2, tmp_path / "c.pt", "noisy")
    resumed = run_script(2, tmp_path / "c.pt", 9, "noisy")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == expected.stdout != ""


@pytest.mark.processes
def test_processes_that_are_killed_resume_with_one_more(tmp_path: Path, run_script: RunScript) -> None:
    kill(run_script, 2, tmp_path / "c.pt", "plain")
    resumed = run_script(3, tmp_path / "c.pt", 9, "plain")
    assert resumed.returncode == 0, resumed.stderr

    [expected] = run_jobs(1, lambda job: Training(job, plain=True, batch=12).run(9).weights)
    first, *others = msgspec.json.decode(resumed.stdout)
    assert all(weights == first for weights in others)
    assert_close(first, expected)


def test_the_random_generators_go_on_where_they_were() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), random.gauss(), float(np.random.rand()), float(np.random.randn())]

    random.gauss()  # leaves a second number behind, which belongs to the state
    np.random.randn()
    state = random_state.capture(nn.Linear(1, 1))
    expected = draw()
    draw()
    assert random_state.restore(state, nn.Linear(1, 1)) == []
    assert draw() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_on_a_gpu_resumes_with_its_random_numbers(tmp_path: Path) -> None:
    def make(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net(dropout=0.5).cuda()
        return distribute(model, torch.optim.AdamW(model.parameters()), job=job)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(16, 5, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def program(job: Job) -> None:
        first, second = make(job), make(job)
        step(*first)
        save(tmp_path / "c.pt", *first)
        step(*first)
        step(*second)
        assert load(tmp_path / "c.pt", *second).lost == ()
        step(*second)
        for ours, theirs in zip(first[0].state_dict().values(), second[0].state_dict().values(), strict=True):
            assert torch.equal(ours, theirs) and ours.is_cuda

    run_jobs(1, program)


# ---------------------------------------------------------------- what torch sees


def test_plain_torch_opens_the_file_and_plain_state_dicts_still_work(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", 3)
    content = torch.load(path, weights_only=True)

    model = Net()
    model.load_state_dict(content["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(content["optimizer"])
    assert content["extra"] == {"step": 3}
    entry = content["stretto"]
    assert entry["world_size"] == 3 and len(entry["ranks"]) == 3 and entry["versions"]["stretto"] == stretto.__version__
    assert sorted(name for bucket in entry["buckets"] for name in bucket) == sorted(name for name, _ in model.named_parameters())
    assert entry["sampler"]["taken"] == [[6, 6, 6]]
    assert [each["rounds"] for each in entry["ranks"]] == [3, 3, 3]


def test_torch_save_and_load_of_a_distributed_model_work_as_before(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        training, plain = Training(job).run(2), Net()
        path = tmp_path / f"{job.rank}.pt"
        torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, path)
        content = torch.load(path, weights_only=True)
        assert list(content["model"]) == list(plain.state_dict())
        other = Training(job)
        other.model.load_state_dict(content["model"])
        other.optimizer.load_state_dict(content["optimizer"])
        assert other.bits == training.bits

    run_jobs(2, program)


def test_what_does_not_carry_over_is_said(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt")

    def program(job: Job) -> Any:
        training = Training(job, strategy="Strategy(schedule=AfterBackward())")
        return load(path, training.model, training.optimizer).lost

    data, strategy = run_jobs(2, program)[1]
    assert "sampler=" in data
    assert "AfterBackward()" in strategy and "then Strategy(" in strategy


# ---------------------------------------------------------------- damage


def test_a_flipped_bit_anywhere_is_found_on_all_ranks_and_nothing_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt")
    good = path.read_bytes()

    def program(job: Job) -> None:
        training = Training(job)
        before = training.bits
        for position in range(0, len(good), len(good) // 25):
            if job.rank == 0:
                path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            assert "is damaged" in raised(lambda: training.load(path))
        assert training.bits == before

    run_jobs(2, program)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda good: good[:-1], "no checksum"),
        (lambda good: good[: len(good) // 2], "no checksum"),
        (lambda good: b"", "no checksum"),
        (lambda good: good + b"x", "no checksum"),
        (None, "FileNotFoundError"),
    ],
    ids=["a byte short", "half", "empty", "longer", "missing"],
)
def test_a_file_that_is_cut_or_missing_is_an_error_on_all_ranks(
    content: Callable[[bytes], bytes] | None, message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "c.pt")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content(path.read_bytes()))

    for said in run_jobs(2, lambda job: raised(lambda: Training(job).load(path))):
        assert message in said and "rank 0 of 2" in said


def test_only_rank_0_needs_to_see_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", 3)

    def program(job: Job) -> Any:
        training = Training(job)
        training.load(path if job.rank == 0 else Path("/nowhere/else.pt"))
        return training.bits

    first, *others = run_jobs(3, program)
    assert all(bits == first for bits in others)


def test_a_read_error_in_the_middle_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "c.pt")
    monkeypatch.setattr(checkpoint_file, "PIECE_BYTES", 1000)
    reads = []
    real = Path.open

    def failing_open(self: Path, *arguments: Any) -> Any:
        file = real(self, *arguments)

        class Failing:
            name = str(self)
            seek, close = file.seek, file.close
            read = file.read
            __enter__, __exit__ = (lambda self: self), (lambda self, *exception: file.close())

            def readinto(self, buffer: Any) -> int:
                reads.append(1)
                if len(reads) == 3:
                    raise OSError(errno.EIO, "Input/output error")
                return int(file.readinto(buffer))

        return Failing()

    monkeypatch.setattr(Path, "open", failing_open)
    assert all("is damaged" in said for said in run_jobs(2, lambda job: raised(lambda: Training(job).load(path))))
    assert len(reads) > 3


# ---------------------------------------------------------------- writing that fails


@contextmanager
def _full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file may grow beyond 1 KB: writing more is an error of the system, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def _failing_fsync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield


@pytest.mark.parametrize(("fault", "message"), [(_full_disk, ""), (_failing_fsync, "No space left")])
def test_a_write_that_fails_raises_on_all_ranks_and_leaves_the_old_checkpoint(
    fault: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "c.pt")
    before = path.read_bytes()

    with fault(monkeypatch):
        said = run_jobs(3, lambda job: raised(lambda: Training(job).run(1).save(path)))
    assert all("failed on rank 0 of 3" in each and message in each for each in said)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c.pt"]
    saved(path, 1)


def test_a_folder_that_is_not_there_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for said in run_jobs(2, lambda job: raised(lambda: Training(job).save(tmp_path / "no" / "c.pt"))):
        assert "FileNotFoundError" in said and "look on its machine" in said


class Colour(Enum):
    RED = "red"


Point = namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"args": argparse.Namespace(lr=0.1)}, "extra['args'] is a argparse.Namespace, neither a tensor nor a plain value"),
        ({"args": argparse.Namespace(lr=0.1)}, "Put vars(...) there"),
        ({"logs": [{"loss": np.float32(1)}]}, "extra['logs'][0]['loss'] is a numpy.float32"),
        (np.float64(1), "extra is a numpy.float64"),
        ((1, np.int64(3)), "Put its .item() there"),
        ({"w": np.zeros(3)}, "torch.from_numpy(...)"),
        ({"path": Path("x")}, "Put str(...) there"),
        ({Path("x"): 1}, "the key PosixPath('x') of extra is a pathlib.PosixPath"),
        ({"colour": Colour.RED}, "Put its .value there"),
        ({"at": Point(1, 2)}, "Put its ._asdict() there"),
        ({"scheduler": torch.optim.SGD([torch.ones(1)])}, "Put its .state_dict() there"),
        ({"seen": defaultdict(int)}, "Put dict(...) there"),
    ],
)
def test_a_value_that_could_not_be_loaded_is_named_with_its_place(extra: Any, message: str) -> None:
    assert message in raised(lambda: plain_values.check(extra, "extra"))


def test_values_that_load_are_let_through() -> None:
    itself: list[Any] = [1, 1j, b"x", None, {2, 3}, (torch.Size([1]), torch.float16), Counter("a"), OrderedDict(a=nn.Parameter())]
    itself.append(itself)
    plain_values.check({"epoch": 3, 4: itself}, "extra")


def test_what_cannot_be_saved_is_an_error_on_all_ranks_before_anything_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(job: Job, place: str) -> str:
        training, extra = Training(job), {"lr": 0.1}
        (extra if place == "extra" else training.optimizer.param_groups[0])["lr"] = np.float64(0.1)
        return raised(lambda: training.save(tmp_path / "c.pt", extra=extra))

    for said in run_jobs(2, program, "optimizer"):
        assert "failed on rank 0 of 2: optimizer['param_groups'][0]['lr'] is a numpy.float64" in said
    monkeypatch.setattr(checkpoint, "_collect_tensors", None)
    for said in run_jobs(2, program, "extra"):
        assert "failed on rank 0 of 2: extra['lr'] is a numpy.float64" in said
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_that_write_the_same_file_do_not_mix_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins and ends while the first is writing, and leaves the first one's part alone."""
    path, real, order = tmp_path / "c.pt", torch.save, list[str]()

    def save_slowly(content: Any, file: Any) -> None:
        if not order:
            order.append("first")
            checkpoint_file.write(path, {"value": "second"})
            assert torch.load(path, weights_only=True) == {"value": "second"}
        real(content, file)
        order.append(content["value"])

    monkeypatch.setattr(torch, "save", save_slowly)
    checkpoint_file.write(path, {"value": "first"})
    assert order == ["first", "second", "first"]
    assert torch.load(path, weights_only=True) == {"value": "first"}
    assert [each.name for each in tmp_path.iterdir()] == ["c.pt"]


# ---------------------------------------------------------------- links


def test_a_planted_part_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link or a file under the name that versions before took, and under the very name that is drawn."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for plant in (os.symlink, os.link):
        folder = tmp_path / plant.__name__
        folder.mkdir()
        plant(victim, folder / "c.pt.part")
        checkpoint_file.write(folder / "c.pt", {"value": 1})
        assert victim.read_text() == "precious"

        monkeypatch.setattr(checkpoint_file, "remove_left", lambda target: None)
        monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 16)
        plant(victim, folder / f"c.pt.{'0' * 16}.part")
        raised(lambda folder=folder: checkpoint_file.write(folder / "c.pt", {"value": 2}), FileExistsError)  # type: ignore[misc]
        monkeypatch.undo()
        assert victim.read_text() == "precious"
        checkpoint_file.write(folder / "c.pt", {"value": 3})
        assert torch.load(folder / "c.pt", weights_only=True) == {"value": 3}


def test_a_link_of_the_users_own_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    real, first, second = tmp_path / "runs" / "7.pt", tmp_path / "last.pt", tmp_path / "best.pt"
    first.symlink_to("runs/7.pt")
    second.symlink_to(first)
    for value in (1, 2):  # it points to nothing, and to an older checkpoint
        checkpoint_file.write(second, {"value": value})
        assert first.is_symlink() and second.is_symlink() and not real.is_symlink()
        assert torch.load(real, weights_only=True) == {"value": value}
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["7.pt", "best.pt", "last.pt", "runs"]
    real.unlink()
    real.symlink_to(second)
    assert "links in a row" in raised(lambda: checkpoint_file.write(second, {"value": 3}))


def test_a_link_of_somebody_else_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, planted, real = tmp_path / "victim", tmp_path / "c.pt", os.lstat
    victim.write_text("precious")
    planted.symlink_to(victim)
    stranger = max(os.geteuid(), tmp_path.stat().st_uid) + 1

    def lstat(path: Any) -> os.stat_result:
        found = list(real(path))
        return os.stat_result([*found[:4], stranger, *found[5:]])

    monkeypatch.setattr(os, "lstat", lstat)
    assert f"user {stranger} has put there" in raised(lambda: checkpoint_file.write(planted, {"value": 1}))
    assert victim.read_text() == "precious" and planted.is_symlink()


# ---------------------------------------------------------------- memory


class Measured(nn.Module):
    """Buffers of every kind, of other values on every worker."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("large", torch.full((40_000,), float(rank)))
        self.register_buffer("flag", torch.tensor(rank == 1))
        self.register_buffer("conjugate", torch.tensor([1 + 1j * rank]).conj())
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t() + rank)
        self.register_buffer("nothing", torch.empty(0, 4))


@pytest.mark.parametrize("size", [1, 3])
def test_local_buffers_of_any_size_and_dtype_are_saved(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel as tensors: what `gather_object` carries has a limit, of 64 MB, which here is 100 KB."""
    monkeypatch.setattr(calls, "MAX_OBJECT_BYTES", 100_000)
    path = tmp_path / "c.pt"

    def program(job: Job) -> None:
        pairs = []
        for rank in (job.rank, 9):
            model = Measured(rank)
            pairs.append(distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), RING, buffers="local", job=job))
        for name, buffer in Measured(job.rank).named_buffers():
            pairs[0][0].get_buffer(name).copy_(buffer)  # distribute made them all rank 0's
        save(path, *pairs[0])
        load(path, *pairs[1])
        for name, buffer in Measured(job.rank).named_buffers():
            assert repr(pairs[1][0].get_buffer(name)) == repr(buffer.resolve_conj()), name

    run_jobs(size, program)


def test_loading_takes_the_memory_of_the_file_once_and_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of 64 MB. The copy of the file is as large; nothing else may be. (It was 2.3 times the file.)"""
    monkeypatch.setattr(checkpoint_file, "PIECE_BYTES", 1 << 20)
    apply, loaded = checkpoint._apply, list[int]()

    def measure(*arguments: Any) -> Any:
        loaded.append(resident("RssAnon"))
        return apply(*arguments)

    monkeypatch.setattr(checkpoint, "_apply", measure)

    def program(job: Job) -> list[int]:
        model = nn.Linear(2, 1)
        model.register_buffer("table", torch.ones(16 << 20))
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), RING, job=job)
        model(torch.ones(2)).backward()
        optimizer.step()
        save(tmp_path / "c.pt", model, optimizer, extra={"mean": torch.ones(1000)})
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, anonymous = resident("VmRSS"), resident("RssAnon")
        resumed = load(tmp_path / "c.pt", model, optimizer)
        peak, after = resident("VmHWM") - before, resident("VmRSS") - before
        assert resumed.extra["mean"].sum() == 1000 and len(optimizer.state) == 2
        assert "stretto checkpoint" not in Path("/proc/self/maps").read_text()  # nothing that stays lies in the copy
        return [peak, after, loaded[0] - anonymous]

    [(peak, after, beside_the_copy)] = run_jobs(1, program)
    file = (tmp_path / "c.pt").stat().st_size
    assert file > 64 << 20
    assert 0.9 * file < peak < 1.4 * file and after < 0.2 * file and beside_the_copy < 0.2 * file


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def test_a_worker_without_memory_for_the_file_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = saved(tmp_path / "c.pt"), os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name: os.open("/dev/full", os.O_WRONLY) if stretto.rank() else real(name))
    for said in run_jobs(2, lambda job: raised(lambda: Training(job).load(path))):
        assert "failed on rank 1 of 2" in said and "No space left" in said


KILLED = """
import os, pathlib, signal, sys
import torch
from stretto import checkpoint_file

path = pathlib.Path(sys.argv[1])
points = [(torch, "save"), (checkpoint_file, "_seal"), (os, "fsync"), (checkpoint_file, "_check_loadable"),
          (pathlib.Path, "replace"), (checkpoint_file, "_sync_folder")]
for when in ("before", "after"):
    for owner, name in points:
        checkpoint_file.write(path, {"value": torch.zeros(1000)})
        child = os.fork()
        if child == 0:
            real = getattr(owner, name)

            def die(*arguments, **options):
                if when == "after":
                    real(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(owner, name, die)
            checkpoint_file.write(path, {"value": torch.ones(1000)})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the fault did not fire"
        with path.open("rb") as file:
            num_bytes, expected = checkpoint_file.seal_of(file, path)
            import hashlib
            assert hashlib.sha256(file.read(num_bytes)).hexdigest() == expected
        value = torch.load(path, weights_only=True)["value"][0].item()
        renamed = name == "_sync_folder" or (name, when) == ("replace", "after")
        print(when, name, value, flush=True)
        assert value == float(renamed)
checkpoint_file.write(path, {"value": torch.ones(1000)})
assert [each.name for each in path.parent.iterdir()] == [path.name]
print("whole")
"""


@pytest.mark.processes
def test_a_kill_at_any_point_of_writing_leaves_a_whole_checkpoint(tmp_path: Path, preloaded: Preloaded) -> None:
    script, folder = tmp_path / "killed.py", tmp_path / "folder"
    script.write_text(KILLED)
    folder.mkdir()
    done = preloaded.run(script, folder / "c.pt", folder=tmp_path, timeout_s=60)
    assert done.stdout.endswith("whole\n"), done.stdout + done.stderr


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (lambda: Net(hidden=9), torch.optim.AdamW, "'first.weight' is (9, 5) float32 in this model and (8, 5) float32"),
        (lambda: Net(norm=False), torch.optim.AdamW, "'norm.weight' is in the checkpoint and not in this model"),
        (lambda: nn.Sequential(Net()), torch.optim.AdamW, "'0.first.weight' is in this model and not in the checkpoint"),
        (lambda: Net().double(), torch.optim.AdamW, "'first.weight' is (8, 5) float64 in this model and (8, 5) float32"),
        (Net, torch.optim.SGD, "the optimizer is SGD here and AdamW in the checkpoint"),
        (Net, lambda p: torch.optim.AdamW(list(p)[:2]), "the optimizer's groups have [[2]] parameters here and [[5]]"),
    ],
)
def test_another_model_or_optimizer_is_an_error_on_all_ranks(
    make: Callable[[], nn.Module], optimizer: Any, message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "c.pt")

    def program(job: Job) -> str:
        model = make()
        pair = distribute(model, optimizer(model.parameters()), "ddp()", job=job)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        said = raised(lambda: load(path, *pair))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return said

    assert all(message in said for said in run_jobs(2, program))


def test_ranks_at_different_places_in_the_data_cannot_save(tmp_path: Path) -> None:
    def program(job: Job) -> str:
        training = Training(job).run(1)
        training.sampler.set_epoch(job.rank)
        return raised(lambda: training.save(tmp_path / "c.pt"))

    assert all("different places in the data" in said for said in run_jobs(2, program))


def test_a_sampler_that_nobody_counted_for_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def program(job: Job) -> str:
        training = Training(job).run(1)
        next(iter(training.loader))  # a look
        training.save(tmp_path / "c.pt")
        training = Training(job)
        for (x,) in training.loader if job.rank == 1 else training.sampler.follow(training.loader):
            training.model(x).sum().backward()
            training.optimizer.step()
            return raised(lambda: training.save(tmp_path / "c.pt"))
        return "no batch"

    assert all("failed on rank 1 of 2" in said and "follow" in said for said in run_jobs(2, program))


def test_another_dataset_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt")

    def program(job: Job) -> str:
        training = Training(job)
        return raised(lambda: load(path, training.model, training.optimizer, sampler=Sampler(10, job=job)))

    assert all("has 10 samples, and the state is about one of 84" in said for said in run_jobs(2, program))


def test_what_was_not_distributed_together_is_refused(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        training, other = Training(job), Training(job)
        path = tmp_path / "c.pt"
        assert "not been distributed" in raised(lambda: save(path, Net(), training.optimizer), ConfigurationError)
        assert "not with the very same" in raised(lambda: save(path, training.model, other.optimizer), ConfigurationError)
        elsewhere = Job(job.launch, job.peers, None, job.timeouts)
        refused = raised(lambda: save(path, training.model, training.optimizer, job=elsewhere), ConfigurationError)
        assert "another job" in refused

    run_jobs(2, program)
