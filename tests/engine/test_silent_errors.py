"""What would give wrong numbers without a word: each gives the right ones, or an error."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engine.worker import RING, assert_equal_everywhere, data, gradients_of, mlp, rounds, seeded, start, state_of
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.collectives.request import Pending
from stretto.distributing import distribute, engine_of, no_sync
from stretto.engine.training import RoundEnd
from stretto.errors import BackwardFailed, ConfigurationError, PeerLost
from stretto.job import Job
from stretto.testing import run_jobs

SIZE = 3


# -- replaced layers --------------------------------------------------------------------------------------------------


def test_a_layer_replaced_again_and_again_is_everybodys_and_combined() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        start(job, model)
        for step in range(10):
            delattr(model, "4")  # in the same table of children, unlike del model[4]
            model.add_module("4", seeded(lambda: nn.Linear(5, 1).double(), seed=job.rank))
            model(data(job.rank, step)).pow(2).mean().backward()
        gradients = {f"gradient of {name}": g for name, g in gradients_of(model).items() if g is not None}
        assert len(gradients) == 6
        return state_of(model) | gradients

    assert_equal_everywhere(run_jobs(SIZE, program))


# -- second derivatives -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's own, about a leak
@pytest.mark.parametrize("refused", [[0, 1, 2], [1]], ids=str)
@pytest.mark.parametrize("accumulating", [False, True])
def test_backward_with_create_graph_is_refused_and_training_goes_on(refused: list[int], accumulating: bool) -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = start(job, model)
        if accumulating and job.rank in refused:
            with no_sync(model):
                torch.autograd.backward(model[0](data(job.rank)).tanh().sum(), create_graph=True)
        loss = model(data(job.rank)).pow(2).mean()
        if job.rank not in refused:
            with pytest.raises(BackwardFailed) as failed:
                loss.backward()
            assert failed.value.ranks == refused
        else:
            with pytest.raises(ConfigurationError, match=r"torch\.autograd\.grad"):
                loss.backward(create_graph=not accumulating)
        optimizer.step()
        model(data(job.rank, 1)).pow(2).mean().backward()
        optimizer.step()
        assert rounds(model) == 2
        return state_of(model)

    states = run_jobs(SIZE, program)
    assert_equal_everywhere(states)
    alone = mlp()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for rank in range(SIZE):
        (alone(data(rank, 1)).pow(2).mean() / SIZE).backward()
    optimizer.step()
    for name, value in state_of(alone).items():
        torch.testing.assert_close(states[0][name], value)


def test_a_gradient_penalty_by_way_of_autograd_grad_is_right() -> None:
    def penalty(model: nn.Module, rank: int) -> Tensor:
        inner = torch.autograd.grad(model(data(rank)).pow(2).mean(), list(model.parameters()), create_graph=True)
        return torch.stack([g.pow(2).sum() for g in inner]).sum()

    def program(job: Job) -> dict[str, Tensor | None]:
        model = mlp()
        start(job, model)
        penalty(model, job.rank).backward()  # type: ignore[no-untyped-call]
        return gradients_of(model)

    alone = mlp()
    for rank in range(SIZE):
        (penalty(alone, rank) / SIZE).backward()  # type: ignore[no-untyped-call]
    for found in run_jobs(SIZE, program):
        torch.testing.assert_close(found, gradients_of(alone))


# -- buffers that backward reads --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Its gradient is the scale of the batch, which it keeps in a buffer."""

    scale: Tensor

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.in_place = in_place
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        measured = x.abs().mean().detach()
        if self.in_place:
            self.scale.copy_(measured)
        else:
            self.scale = measured
        return (self.w * self.scale).sum()


def test_a_buffer_that_backward_reads_survives_a_second_forward() -> None:
    def program(job: Job) -> dict[str, Tensor | None]:
        model = Scaled()
        optimizer = start(job, model)
        for step in range(3):
            optimizer.zero_grad()
            (model(data(job.rank, step)) + model(data(job.rank, step + 9))).backward()
        return gradients_of(model)

    expected = sum(data(rank, step).abs().mean() for rank in range(SIZE) for step in (2, 11)) / SIZE
    for found in run_jobs(SIZE, program):
        torch.testing.assert_close(found["w"], torch.ones(3, dtype=torch.float64) * expected)


def test_references_to_a_buffer_stay_good_from_round_to_round() -> None:
    def program(job: Job) -> bool:
        model = Scaled(in_place=True)
        start(job, model)
        held = model.scale
        for step in range(3):
            model(data(job.rank, step)).backward()
        return held is model.scale

    assert all(run_jobs(SIZE, program))


# -- sparse or dense --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=True)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, tied: bool = True) -> Tensor:
        hidden = self.embed(tokens)
        out: Tensor = self.out(hidden) if tied else hidden
        return out


@pytest.mark.parametrize("dense_on", [[0, 1, 2], [1], []], ids=str)
def test_a_tied_embeddings_gradient_is_dense_everywhere_if_it_is_anywhere(dense_on: list[int]) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        found: Tensor = model(torch.tensor([rank, 3, 3]), tied=rank in dense_on).pow(2).mean() * (rank + 1)
        return found

    def program(job: Job) -> tuple[dict[str, Tensor], Tensor]:
        model = seeded(lambda: Tied().double())
        kind: Any = torch.optim.AdamW if dense_on else torch.optim.SparseAdam
        optimizer = kind(model.parameters())
        distribute(model, optimizer, RING, job=job)
        with job.weighing(job.rank + 1.0):
            loss(model, job.rank).backward()  # type: ignore[no-untyped-call]
        gradient = model.embed.weight.grad
        assert gradient.is_sparse == (not dense_on)
        optimizer.step()
        return state_of(model), gradient.to_dense()

    results = run_jobs(SIZE, program)
    assert_equal_everywhere([state for state, _ in results])
    alone = seeded(lambda: Tied().double())
    for rank in range(SIZE):
        (loss(alone, rank) * (rank + 1) / 6).backward()  # type: ignore[no-untyped-call]
    for _, gradient in results:
        torch.testing.assert_close(gradient, alone.embed.weight.grad.to_dense())


# -- an error while other buckets are under way -----------------------------------------------------------------------


def test_after_an_error_nothing_is_under_way_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[Pending] = []
    wait = Pending.wait

    def fail_first(pending: Pending) -> None:
        wait(pending)
        if pending in broken:
            raise PeerLost(1, "as the test has it")

    monkeypatch.setattr(Pending, "wait", fail_first)

    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        engine = engine_of(model)
        training = cast(SynchronousAllReduce, engine.training)
        seen: list[Any] = []
        send_rest, reset = training._send_rest, engine._reset

        def send_and_break(end: RoundEnd) -> None:
            send_rest(end)
            seen.extend(bucket.exchange._pending for bucket in training.buckets)  # type: ignore[union-attr]
            broken.append(seen[0])

        def reset_when_done() -> None:
            assert len(seen) > 2 and all(pending.done for pending in seen)
            reset()

        training._send_rest, engine._reset = send_and_break, reset_when_done  # type: ignore[method-assign]
        with pytest.raises(PeerLost, match="as the test has it"):
            model(data(job.rank)).sum().backward()
        assert all(p.grad is None for p in model.parameters())

    run_jobs(SIZE, program)
    assert len(broken) == SIZE
