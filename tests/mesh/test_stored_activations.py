"""What checkpointed modules keep: memory of a set size, slices of the same tensors, host memory."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import stretto
from mesh.models import build, mesh_of
from stretto.engine.arena import MemoryKind
from stretto.errors import RankMismatch
from stretto.job import Job
from stretto.mesh.kept_arena import KeptArena, KeptPiece
from stretto.mesh.stored_activations import Store
from stretto.testing import run_jobs

KIND = MemoryKind(torch.float32, torch.device("cpu"))
BLOCKS, ROWS, WIDTH = 3, 8, 16


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def in_turn(model: nn.Module, alive: int, number: int) -> list[Tensor]:
    """Gradients, after forwards and backwards of micro-batches of which so many are alive at once, as in a pipeline."""
    generator = torch.Generator().manual_seed(1)
    waiting: list[Tensor] = []
    model.zero_grad()
    for _ in range(number):
        waiting.append(model(torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()).sum())
        if len(waiting) == alive:
            torch.autograd.backward(waiting.pop(0))
    while waiting:
        torch.autograd.backward(waiting.pop(0))
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_memory_is_as_long_as_the_most_that_is_kept_at_once() -> None:
    """And not as all micro-batches of a step, or of the longest step there was."""
    arena, found = KeptArena(KIND), []
    for alive, number in ((4, 16), (4, 16), (16, 16), (16, 16), (1, 16)):
        waiting: list[KeptPiece] = []
        for _ in range(number):
            waiting.append(arena.take(64))
            if len(waiting) == alive:
                waiting.pop(0)
        waiting.clear()
        found.append(arena.length // 64)
    assert found == [0, 4, 4, 16, 1]  # a pass shows how much it is for the next


def test_what_is_empty_begins_no_pass() -> None:
    """The next one began another, and the arena was made for nothing."""
    arena, found = KeptArena(KIND), []
    for _ in range(3):
        kept = [arena.take(length) for length in (0, 64, 0, 64)]
        assert [len(piece.values) for piece in kept] == [0, 64, 0, 64]
        kept.clear()
        found.append(arena.length // 64)
    assert found == [0, 2, 2]


def test_micro_batches_that_are_alive_one_after_the_other_take_no_more() -> None:
    def program(job: Job) -> float:
        model, plain = build(blocks), build(blocks)
        stretto.checkpoint_activations(model, "*", partition=mesh_of(job, model=2).group("model"))
        for _ in range(3):
            for mine, expected in zip(in_turn(model, 2, 16), in_turn(plain, 2, 16), strict=True):
                torch.testing.assert_close(mine, expected)
        (arena,) = model[0]._store.arenas.values()
        return float(arena.length / (BLOCKS * ROWS * WIDTH / 2))

    for length in run_jobs(2, program):
        assert length <= 3  # 2, but if a worker was slow its peer may have looked at where it is, and held its frames a little


def test_what_is_kept_is_nobody_elses() -> None:
    """Lengths and order at random: each piece holds its own number until it is let go of, and there is a bound."""
    draw, arena = random.Random(3), KeptArena(KIND)
    kept: list[tuple[KeptPiece, int]] = []
    fitted = outside = 0
    for number in range(3000):
        most = 30 if number < 1500 else 6
        if kept and (len(kept) >= most or draw.random() < 0.5):
            piece, value = kept.pop(draw.randrange(len(kept)))
            assert bool((piece.values == value).all())
            del piece
        else:
            piece = arena.take(draw.choice([1, 16, 100, 256]))
            inside = arena.length > 0 and piece.values.untyped_storage().nbytes() == 4 * arena.length
            fitted, outside = fitted + inside, outside + (not inside)
            piece.values.fill_(number)
            kept.append((piece, number))
            del piece
    assert fitted > 500 and outside > 10 and 0 < arena.length <= 2 * 6 * 256


def test_what_was_put_together_outlives_what_was_kept() -> None:
    """An arena gives out memory again as soon as it is let go of, so nothing that backward has read may lie there."""

    def program(job: Job) -> int:
        store = Store(mesh_of(job, model=2).group("model"), offload=False)
        reused = 0
        for number in range(10):  # the first time not in the arena
            kept = store.pack(torch.full((10,), float(number)).requires_grad_())
            found, place = store.unpack(kept), kept.piece.values.data_ptr()
            del kept
            again = store.pack(torch.full((10,), -1.0).requires_grad_())
            reused += again.piece.values.data_ptr() == place
            assert found.tolist() == [number] * 10
            del again
        return reused

    assert min(run_jobs(2, program)) > 0


def test_members_with_different_inputs_are_refused() -> None:
    """Each would get gradients at a mixture of both: wrong without a word."""

    def program(job: Job) -> str:
        model = build(blocks)
        stretto.checkpoint_activations(model, "*", partition=mesh_of(job, model=2).group("model"))
        with pytest.raises(RankMismatch) as refused:
            model(torch.full((ROWS, WIDTH), float(job.rank)).requires_grad_())
        return str(refused.value)

    for words in run_jobs(2, program):
        assert "'0' is checkpointed in slices, and ranks 0 and 1 have called it with different inputs" in words
        assert "or leave partition out" in words


def test_so_are_those_whose_weights_differ() -> None:
    def program(job: Job) -> str:
        model = build(blocks, seed=job.rank)
        stretto.checkpoint_activations(model, "1", partition=mesh_of(job, model=2).group("model"))
        with pytest.raises(RankMismatch) as refused:
            model(torch.ones(ROWS, WIDTH))
        return str(refused.value)

    assert all(words.startswith("'1' is checkpointed") for words in run_jobs(2, program))


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_gradients_are_those_of_the_plain_model(partition: bool, offload: Literal["cpu"] | None) -> None:
    def program(job: Job) -> Any:
        model = build(blocks)
        group = mesh_of(job, model=2).group("model") if partition else None
        stretto.checkpoint_activations(model, "*", partition=group, offload=offload)
        return in_turn(model, 2, 4)

    expected = in_turn(build(blocks), 2, 4)
    for gradients in run_jobs(2, program):
        for mine, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_of_a_model_on_a_cpu_host_memory_is_where_everything_is() -> None:
    x = torch.ones(10).requires_grad_()
    assert Store(None, offload=True).pack(x) is x
