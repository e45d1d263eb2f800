"""Workers with weights of their own: the vector of weights, consensus, buffers, checkpoints, distributing again, refusals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from resumable_training import Net, Training
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.own_weights import flat_weights
from stretto.aggregate.own_weights.flat_weights import FlatWeights
from stretto.aggregate.shared_memory import SharedMemory
from stretto.averaging import consensus
from stretto.checkpoint import load, save
from stretto.distributing import distribute, engine_of, join, release, weight
from stretto.errors import CheckpointError, ConfigurationError, NonFiniteGradient
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.outer import Nesterov
from stretto.testing import run_jobs

LOCAL = Strategy(aggregate=AllReduce("ring"), sync=LocalSGD(4))


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).float() for parameter in model.parameters()])


def trained(job: Job, steps: int, strategy: Strategy = LOCAL, **options: Any) -> Training:
    return Training(job, strategy=strategy, **options).run(steps)


# -- the vector -------------------------------------------------------------------------------------------------------


def test_weights_are_one_vector_that_is_read_written_and_moved_in_place() -> None:
    named = [("a", nn.Parameter(torch.arange(6.0).view(2, 3))), ("b", nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))]
    weights = FlatWeights(named)
    assert weights.numel == 8 and [tuple(part) for part in weights.parts] == [("a", 0, 6), ("b", 6, 8)]
    assert weights.read().tolist() == [0, 1, 2, 3, 4, 5, 1, 1]
    places = [parameter.data_ptr() for _, parameter in named]
    weights.write(torch.arange(8.0) * 2)
    weights.add(torch.full((8,), 0.5))
    assert named[0][1].tolist() == [[0.5, 2.5, 4.5], [6.5, 8.5, 10.5]] and named[1][1].tolist() == [12.5, 14.5]
    assert [parameter.data_ptr() for _, parameter in named] == places
    by_name = weights.by_name(weights.read())
    assert by_name["a"].shape == (2, 3) and torch.equal(weights.from_names(by_name), weights.read())


def test_a_move_is_added_in_float32_and_rounded_once() -> None:
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    FlatWeights([("p", parameter)]).add(torch.tensor([0.0078125]))  # 2**-7: one bit of bfloat16 at 1
    assert parameter.tolist() == [1.0078125]


def test_weights_lie_in_their_logical_order_whatever_their_memory() -> None:
    image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    weights = FlatWeights([("image", image)])
    assert torch.equal(weights.read(), image.detach().contiguous().reshape(-1))
    weights.write(weights.read() * 2)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_a_sum_of_squares_is_precise_and_takes_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class LargestDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype is torch.float64:
                self.numel = max(self.numel, out.numel())
            return out

    monkeypatch.setattr(flat_weights, "PIECE", 100)
    values = torch.randn(1_050) * 1e6
    with LargestDouble() as largest:  # type: ignore[no-untyped-call]
        found = flat_weights.sum_of_squares(values)
    assert largest.numel == 100
    torch.testing.assert_close(found, values.double().square().sum().reshape(1))


# -- consensus --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_consensus_gives_the_mean_and_says_how_far_apart_the_workers_were(size: int) -> None:
    def program(job: Job) -> tuple[Tensor, Tensor, float, list[Tensor]]:
        model = trained(job, 3).model
        own, buffers = weights_of(model), [buffer.clone() for buffer in model.buffers()]
        found = consensus(model)
        assert job.ledger.consensus_distance == (found.distance if size > 1 else None)
        return own, weights_of(model), found.distance, buffers + [buffer.clone() for buffer in model.buffers()]

    runs = run_jobs(size, program)
    own = torch.stack([run[0] for run in runs])
    for _, mean, distance, buffers in runs:
        torch.testing.assert_close(mean, own.mean(0))
        torch.testing.assert_close(distance, float((own - own.mean(0)).square().sum(1).mean().sqrt()), rtol=1e-5, atol=1e-6)
        assert torch.equal(mean, runs[0][1]) and (distance > 0) == (size > 1)
        for then, now, first in zip(buffers[:3], buffers[3:], runs[0][3][3:], strict=True):
            assert torch.equal(now, first)  # running mean and variance, and the count of batches
            assert size == 1 or then.dtype is torch.int64 or not torch.equal(then, now)


def test_in_a_with_block_the_mean_is_there_and_own_weights_come_back() -> None:
    def program(job: Job) -> None:
        training = trained(job, 3)
        before = training.bits
        with consensus(training.model) as mean:
            assert mean.distance > 0 and training.bits != before
            with pytest.raises(ConfigurationError, match="inside `with stretto.consensus"):
                training.optimizer.step()
            with pytest.raises(CheckpointError, match="inside `with stretto.consensus"):
                save("never.pt", training.model, training.optimizer, job=job)
        assert training.bits == before
        with pytest.raises(ConfigurationError, match="that is over"):
            mean.__enter__()
        training.run(1)

    run_jobs(2, program)


def test_training_that_looked_at_the_mean_ends_with_the_same_bits() -> None:
    def program(job: Job, looks: bool) -> list[bytes]:
        training = trained(job, 3)
        if looks:
            with consensus(training.model):
                pass
        return training.run(3).bits

    assert run_jobs(3, program, True) == run_jobs(3, program, False)


def test_a_mean_that_stays_is_where_training_goes_on() -> None:
    def program(job: Job) -> tuple[Tensor, float, float]:
        training = trained(job, 3)
        consensus(training.model)
        mean = weights_of(training.model)
        return mean, consensus(training.model).distance, consensus(training.run(1).model).distance

    runs = run_jobs(2, program)
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == 0 == runs[0][2]  # the fourth step ends with an exchange


def test_consensus_of_equal_replicas_is_what_is_there() -> None:
    def program(job: Job) -> float:
        training = trained(job, 2, Strategy(aggregate=AllReduce("ring")))
        before, collectives = training.bits, job.ledger.collectives.total()
        with consensus(training.model) as found:
            assert training.bits == before
        assert job.ledger.collectives.total() == collectives
        return found.distance

    assert run_jobs(2, program) == [0.0, 0.0]


def test_consensus_of_a_model_in_shared_memory_is_refused() -> None:
    def program(job: Job) -> None:
        training = trained(job, 1, Strategy(aggregate=SharedMemory(), sync=Asynchronous()), plain=True)
        with pytest.raises(ConfigurationError, match="in memory that the workers share"):
            consensus(training.model)

    run_jobs(2, program)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_law_9_resumed_in_the_middle_of_a_period_the_bits_are_the_same(size: int, buffers: str, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    expected = run_jobs(size, lambda job: trained(job, 9, buffers=buffers).bits)

    def first(job: Job) -> list[bytes]:
        training = trained(job, 6, buffers=buffers)
        training.save(path)
        return training.run(3).bits

    def second(job: Job) -> list[bytes]:
        training = Training(job, strategy=LOCAL, buffers=buffers)
        assert training.load(path).lost == ()
        return training.run(3).bits

    assert run_jobs(size, first) == expected  # saving changes nothing
    assert run_jobs(size, second) == expected
    assert size == 1 or expected[0] != expected[1]


def test_the_model_in_the_file_is_the_mean(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"

    def program(job: Job) -> dict[str, Tensor]:
        training = trained(job, 3)
        training.save(path)
        return {name: value.clone() for name, value in training.model.state_dict().items()}

    models, content = run_jobs(3, program), torch.load(path, weights_only=True)
    for name, value in content["model"].items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([model[name] for model in models]).mean(0))


def test_right_after_an_exchange_no_weights_are_saved_twice(tmp_path: Path) -> None:
    def program(job: Job, steps: int) -> None:
        trained(job, steps).save(tmp_path / f"{steps}.pt")

    for steps, count in ((3, 5), (4, 0)):
        run_jobs(2, program, steps)
        ranks = torch.load(tmp_path / f"{steps}.pt", weights_only=True)["stretto"]["ranks"]
        assert [len(rank["model"]["parameters"]) for rank in ranks] == [count] * 2


@pytest.mark.parametrize("strategy", [LOCAL, Strategy(aggregate=AllReduce("ring"))], ids=["local", "synchronous"])
def test_another_number_of_workers_or_another_way_of_training_begins_from_the_mean(strategy: Strategy, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    run_jobs(3, lambda job: trained(job, 3).save(path))
    mean = torch.load(path, weights_only=True)["model"]

    def program(job: Job) -> list[str]:
        training = Training(job, strategy=strategy)
        lost = training.load(path).lost
        for name, value in training.model.state_dict().items():
            assert torch.equal(value, mean[name])
        training.run(3)
        return list(lost)

    for size in (2,) if strategy == LOCAL else (2, 3):
        assert all(any("own model and optimizer" in one for one in lost) for lost in run_jobs(size, program))


# -- distributing again, and releasing --------------------------------------------------------------------------------


def test_distributing_again_begins_from_the_mean() -> None:
    def program(job: Job) -> tuple[Tensor, Tensor]:
        training = trained(job, 3)
        own = weights_of(training.model)
        distribute(training.model, training.optimizer, LOCAL, job=job)
        return own, weights_of(training.model)

    runs = run_jobs(3, program)
    for _, now in runs:
        torch.testing.assert_close(now, torch.stack([own for own, _ in runs]).mean(0))


@pytest.mark.parametrize("start_after", [0, 2, 6, 12])
def test_distributing_again_right_after_an_exchange_changes_nothing(start_after: int) -> None:
    """Momentum over exchanges goes on, and so does the number of steps before which all are synchronous."""
    strategy = Strategy(aggregate=AllReduce("ring"), sync=LocalSGD(4, outer=Nesterov(0.7, 0.9), start_after=start_after))

    def program(job: Job, again: bool) -> list[bytes]:
        training = trained(job, 8 + start_after % 4, strategy, plain=True)
        if again:
            distribute(training.model, training.optimizer, strategy, job=job)
        return training.run(7).bits

    assert run_jobs(2, program, True) == run_jobs(2, program, False)


def test_distributing_again_after_other_weights_were_loaded_takes_those_of_rank_0() -> None:
    def program(job: Job) -> bool:
        training = trained(job, 3)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.fill_(float(job.rank + 1))
        distribute(training.model, training.optimizer, LOCAL, job=job)
        return bool((weights_of(training.model) == 1.0).all())

    assert run_jobs(2, program) == [True, True]


def test_releasing_keeps_own_weights_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def program(job: Job, steps: int) -> Tensor:
        return weights_of(release(trained(job, steps).model))

    with caplog.at_level(logging.WARNING):
        one, other = run_jobs(2, program, 3)
        assert not torch.equal(one, other) and "Call stretto.consensus(model)" in caplog.text
        caplog.clear()
        one, other = run_jobs(2, program, 4)
        assert torch.equal(one, other) and not caplog.text


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_trained_by_each_worker_for_itself_is_refused() -> None:
    def program(job: Job) -> None:
        model = Net()
        with pytest.raises(ConfigurationError, match="LBFGS with .* decides by the mean loss"):
            distribute(model, torch.optim.LBFGS(model.parameters()), LOCAL, job=job)
        double = Net().double()
        with pytest.raises(ConfigurationError, match="float64: with .* weights travel as float32"):
            distribute(double, torch.optim.SGD(double.parameters(), lr=0.1), LOCAL, job=job)
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ConfigurationError, match="skips steps on one worker and not on another"):
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), LOCAL, scaler=scaler, job=job)
        training = trained(job, 1)
        with pytest.raises(ConfigurationError, match="a worker's steps are its own"), join(training.model):
            pass
        weight(2.0, job=job)
        with pytest.raises(ConfigurationError, match=r"weight\(2\) before a step"):
            training.optimizer.step()
        weight(1.0, job=job)
        training.model.first.weight.requires_grad_(False)
        training.model.extra = nn.Parameter(torch.zeros(1))
        with pytest.raises(ConfigurationError, match=r"parameter extra was frozen, unfrozen, added"):
            training.model(torch.ones(2, 5))

    run_jobs(2, program)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def program(job: Job) -> None:
        training = trained(job, 1, check_finite=True)
        training.model.first.weight.grad = torch.full_like(training.model.first.weight, torch.nan)
        with pytest.raises(NonFiniteGradient, match=f"rank {job.rank} in 'first.weight'.\nLower the learning rate or clip"):
            training.optimizer.step()

    run_jobs(2, program)


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        training = trained(job, 3)
        state = engine_of(training.model).training
        assert (
            state.check_state({"first.weight": {"outer weights": torch.zeros(3)}})
            == "outer weights of first.weight has 3 elements, the parameter 40"
        )
        assert state.check_state({"first.bias": {"outer weights": torch.zeros(8)}}) == "outer weights of first.weight is missing"
        with pytest.raises(CheckpointError):
            load(tmp_path / "none.pt", training.model, training.optimizer, job=job)

    run_jobs(2, program)
