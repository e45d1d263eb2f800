"""What a model that is cut says of itself is whole: state, checkpoints, norms; and what it sends is counted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

import stretto
from mesh.models import (
    ALL,
    KINDS,
    LENGTH,
    WIDTH,
    GPT2Block,
    LlamaBlock,
    build,
    copied,
    distance,
    encoder,
    loss_of,
    mesh_of,
    train,
    words,
)
from stretto.distributing import distribute
from stretto.errors import CheckpointError, ConfigurationError
from stretto.job import Job
from stretto.mesh.cutting import tensor_parallel
from stretto.strategy import Strategy
from stretto.testing import run_jobs

RING = stretto.AllReduce("ring")


def in_stage(stage: int | stretto.Zero) -> Strategy:
    shard = stretto.Zero(stage) if isinstance(stage, int) and stage else stage
    return Strategy(aggregate=RING, shard=shard or stretto.Replicated())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


# -- state --------------------------------------------------------------------------------------------------------------


def test_a_state_dict_is_that_of_the_whole_model_and_loads_into_any_mesh() -> None:
    plain = build("gpt2", seed=7)

    def program(job: Job) -> None:
        model = tensor_parallel(build("gpt2"), mesh_of(job, model=job.world_size), ALL)
        problem = model.load_state_dict(plain.state_dict())
        assert not problem.missing_keys and not problem.unexpected_keys
        state = model.state_dict()
        assert distance(state, copied(plain.state_dict())) == 0.0 and list(state) == list(plain.state_dict())
        assert build("gpt2").load_state_dict(state)
        assert torch.allclose(model(words(0)), plain(words(0)), atol=1e-5)

    for size in (1, 2, 4):
        run_jobs(size, program)


def test_a_slice_is_not_loaded_as_a_whole() -> None:
    def program(job: Job) -> None:
        model = tensor_parallel(build("gpt2"), mesh_of(job, model=2), ALL)
        before = [p.clone() for p in model.parameters()]
        wrong = copied(build("gpt2").state_dict())
        wrong["transformer.h.0.attn.c_attn.weight"] = wrong["transformer.h.0.attn.c_attn.weight"][:, :24].clone()
        with pytest.raises(RuntimeError, match=r"size mismatch for transformer.h.0.attn.c_attn.weight: \(16, 24\)"):
            model.load_state_dict(wrong)
        assert torch.equal(before[4], list(model.parameters())[4])

    run_jobs(2, program)


def test_q_k_and_v_are_each_cut_by_heads() -> None:
    whole: Tensor = build("gpt2").transformer["h"][0].attn.c_attn.weight.detach()

    def program(job: Job) -> Tensor:
        model = tensor_parallel(build("gpt2"), mesh_of(job, model=2), ALL)
        mine: Tensor = model.transformer["h"][0].attn.c_attn.weight.detach().clone()
        return mine

    for place, own in enumerate(run_jobs(2, program)):
        expected = [whole[:, 16 * part + 8 * place : 16 * part + 8 * place + 8] for part in range(3)]
        assert torch.equal(own, torch.cat(expected, 1))


@pytest.mark.parametrize("compress", [stretto.NoCompression(), stretto.ErrorFeedback(stretto.Sign())], ids=["plain", "signs"])
def test_a_checkpoint_goes_on_with_the_same_bits_on_the_same_mesh(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "checkpoint"
    strategy = Strategy(aggregate=RING if compress.lossless else stretto.AllReduce(), compress=compress)

    def start(job: Job, seed: int) -> Any:
        mesh = mesh_of(job, data=2, model=2)
        model = tensor_parallel(build("gpt2", seed), mesh, ALL)
        return mesh, *distribute(model, adamw(model), strategy)

    def first(job: Job) -> dict[str, Tensor]:
        mesh, model, optimizer = start(job, 0)
        mine = [words(step).chunk(2)[mesh.place("data")] for step in range(6)]
        train(model, optimizer, mine[:3])
        stretto.save(path, model, optimizer, extra={"step": 3})
        train(model, optimizer, mine[3:])
        return copied(model.state_dict())

    def second(job: Job) -> Any:
        mesh, model, optimizer = start(job, 5)
        resumed = stretto.load(path, model, optimizer)
        train(model, optimizer, [words(step).chunk(2)[mesh.place("data")] for step in range(3, 6)])
        return copied(model.state_dict()), resumed

    expected = run_jobs(4, first)[0]
    for state, resumed in run_jobs(4, second):
        assert distance(state, expected) == 0.0 and resumed.extra == {"step": 3} and resumed.world_size == 4
        assert all("auto" in lost for lost in resumed.lost)


def on_mesh(job: Job, data: int, size: int) -> Any:
    if data * size == 1:
        return None, build("gpt2", 3)
    mesh = mesh_of(job, data=data, model=size)
    return mesh, tensor_parallel(build("gpt2", 3), mesh, ALL) if size > 1 else build("gpt2", 3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, 0), (1, 1, 0)), ((1, 1, 0), (1, 4, 0)), ((1, 2, 0), (2, 4, 0)), ((2, 2, 0), (2, 1, 0)),
        ((2, 2, 3), (4, 1, 3)), ((4, 1, 2), (2, 2, 3)),
        *(
            pytest.param(*meshes, marks=pytest.mark.slow)
            for meshes in (((2, 2, 3), (1, 4, 1)), ((2, 2, 1), (1, 2, 3)), ((2, 2, 2), (1, 1, 3)))
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_loads_into_any_other_mesh(
    tmp_path: Path, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    """Data, model, and the stage of `Zero`. And is a plain file, of whole tensors."""
    path = tmp_path / "checkpoint"

    def run(job: Job, data: int, size: int, stage: int, *, resume: bool) -> dict[str, Tensor]:
        mesh, model = on_mesh(job, data, size)
        model, optimizer = distribute(model, adamw(model), in_stage(stage))
        if resume:
            resumed = stretto.load(path, model, optimizer)
            assert "optimizer" in resumed.carried and any("random numbers" in lost for lost in resumed.lost)
        place = 0 if mesh is None else mesh.place("data")
        train(model, optimizer, [words(step).chunk(data)[place] for step in (range(3, 6) if resume else range(3))])
        if not resume:
            stretto.save(path, model, optimizer)
        return copied(model.state_dict())

    run_jobs(before[0] * before[1], lambda job: run(job, *before, resume=False))
    content = torch.load(path, weights_only=True)
    plain = build("gpt2", 3)
    optimizer = adamw(plain)
    assert content["model"].keys() == plain.state_dict().keys()
    train(plain, optimizer, [words(step) for step in range(3)])
    for number, state in optimizer.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(content["optimizer"]["state"][number][name], state[name], atol=1e-6)
    train(plain, optimizer, [words(step) for step in range(3, 6)])
    for state in run_jobs(after[0] * after[1], lambda job: run(job, *after, resume=True)):
        assert distance(state, copied(plain.state_dict())) < 1e-4


def test_a_checkpoint_of_another_model_is_refused_on_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def program(job: Job) -> None:
        mesh = mesh_of(job, data=1, model=2)
        model = tensor_parallel(build("gpt2"), mesh, ALL)
        model, optimizer = distribute(model, adamw(model), Strategy(aggregate=RING))
        stretto.save(path, model, optimizer)
        other = tensor_parallel(build("llama"), mesh, ALL)
        other, optimizer = distribute(other, adamw(other), Strategy(aggregate=RING))
        with pytest.raises(CheckpointError, match="of another model"):
            stretto.load(path, other, optimizer)

    run_jobs(2, program)


A_ROUNDING = 2.0**-22  # of float32: norms of slices are added up in float64, those of whole gradients by torch in float32


class Trained(NamedTuple):
    norms: list[float]
    halfway: dict[str, Tensor]
    state: dict[str, Tensor]


def trained(job: Job, path: Path, stage: int | stretto.Zero, *, resume: bool = False) -> Trained:
    """Six steps on a mesh of 2 x 2, of which the first three are in a checkpoint at `path`."""
    mesh = mesh_of(job, data=2, model=2)
    model = tensor_parallel(build("gpt2", job.rank + 10 * resume), mesh, ALL)
    model, optimizer = distribute(model, adamw(model), in_stage(stage))
    norms: list[float] = []
    if resume:
        stretto.load(path, model, optimizer)
    for step in range(3 if resume else 0, 6):
        if step == 3:
            with nullcontext() if stage == 0 else stretto.gathered(model):
                halfway = copied(model.state_dict())
            if not resume:
                stretto.save(path, model, optimizer)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, words(step).chunk(2)[mesh.place("data")]))
        norms.append(stretto.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return Trained(norms, halfway, copied(model.state_dict()))


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, dict[str, Any]]:
    path = tmp_path_factory.mktemp("replicated") / "checkpoint"
    return run_jobs(4, trained, path, 0)[0], torch.load(path, weights_only=True)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_slices_of_zero_are_cut_clipped_saved_and_loaded_as_replicas_are(
    stage: int, tmp_path: Path, replicated: tuple[Trained, dict[str, Any]]
) -> None:
    """Slices over the data dimension, of parameters that are slices over the model dimension."""
    expected, checkpoint = replicated
    path = tmp_path / "checkpoint"
    for found in run_jobs(4, trained, path, stage):
        assert distance(found.halfway, expected.halfway) == distance(found.state, expected.state) == 0.0
        assert found.norms == pytest.approx(expected.norms, rel=A_ROUNDING)
    content = torch.load(path, weights_only=True)
    assert distance(content["model"], expected.halfway) == 0.0
    one, two = (each["optimizer"]["state"] for each in (content, checkpoint))
    assert all(torch.equal(one[n][name], two[n][name]) for n in one for name in ("exp_avg", "exp_avg_sq"))
    for found in run_jobs(4, lambda job: trained(job, path, stage, resume=True)):
        assert distance(found.halfway, expected.halfway) == distance(found.state, expected.state) == 0.0
        assert found.norms == pytest.approx(expected.norms[3:], rel=A_ROUNDING)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_that_only_their_owners_have_unrounded_are_in_the_checkpoint(stage: int, tmp_path: Path) -> None:
    shard = stretto.Zero(stage, weights=stretto.Int8())
    expected = run_jobs(4, trained, tmp_path / "checkpoint", shard)[0]
    for found in run_jobs(4, lambda job: trained(job, tmp_path / "checkpoint", shard, resume=True)):
        assert distance(found.state, expected.state) == 0.0 and found.norms == expected.norms[3:]


def test_what_has_another_shape_is_not_loaded_into_slices_of_slices() -> None:
    def program(job: Job) -> None:
        model = tensor_parallel(build("gpt2"), mesh_of(job, data=2, model=2), ALL)
        model, _ = distribute(model, adamw(model), in_stage(3))
        before = copied(model.state_dict())
        wrong = {**before, "transformer.h.0.attn.c_attn.weight": torch.ones(16, 24)}
        with pytest.raises(RuntimeError, match=r"size mismatch for transformer.h.0.attn.c_attn.weight: \(16, 24\)") as error:
            model.load_state_dict(wrong)
        assert "Missing" not in str(error.value)
        assert distance(model.state_dict(prefix="it."), {f"it.{name}": value for name, value in before.items()}) == 0.0
        with pytest.raises(ConfigurationError, match="stretto.gathered"):
            model.state_dict(keep_vars=True)

    run_jobs(4, program)


# -- norms --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_counts_each_slice_once(norm_type: float) -> None:
    plain = build("encoder", dtype=torch.float64)
    torch.autograd.backward(loss_of(plain, words(0)))
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)

    def program(job: Job) -> Any:
        model = tensor_parallel(build("encoder", dtype=torch.float64), mesh_of(job, model=2), ALL)
        torch.autograd.backward(loss_of(model, words(0)))
        norm = stretto.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        return norm.item(), copied(model.state_dict())

    results = run_jobs(2, program)
    for norm, state in results:
        assert norm == pytest.approx(expected.item(), rel=1e-6) and norm == results[0][0]
        assert distance(state, {name: p.grad for name, p in plain.named_parameters()}) < 1e-8


def test_clipping_of_a_model_that_is_whole_is_torchs() -> None:
    one, other = build("llama"), build("llama")
    for model in (one, other):
        torch.autograd.backward(loss_of(model, words(0)))
    norms = stretto.clip_grad_norm_(one.parameters(), 0.1), torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    assert norms[0] == norms[1]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_a_norm_that_is_not_finite_can_be_an_error() -> None:
    def program(job: Job) -> None:
        model = tensor_parallel(build("maps"), mesh_of(job, model=2), KINDS["maps"][1])
        torch.autograd.backward(loss_of(model, words(0)) * float("nan"))
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            stretto.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    run_jobs(2, program)


# -- bytes --------------------------------------------------------------------------------------------------------------


BLOCKS: dict[str, Any] = {"llama": LlamaBlock, "gpt2": GPT2Block, "encoder": lambda: cast(Any, encoder()).body.layers[0]}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_block_sends_four_all_reduces_of_its_activation(kind: str, size: int) -> None:
    """Two forward, two backward: what q, k and v read is summed once in backward, and what a gate and its values read too."""
    batch = 3

    def program(job: Job) -> tuple[int, int]:
        block = nn.Sequential(BLOCKS[kind]())
        tensor_parallel(block, mesh_of(job, model=size), ALL)
        x = torch.ones(batch, LENGTH, WIDTH).requires_grad_()
        block(x)  # the first forward compares what workers were given
        counts = job.ledger.collectives["all_reduce"], job.ledger.bytes_sent
        torch.autograd.backward(block(x).square().mean())
        return job.ledger.collectives["all_reduce"] - counts[0], job.ledger.bytes_sent - counts[1]

    activation = batch * LENGTH * WIDTH * 4
    results = run_jobs(size, program)
    assert [number for number, _ in results] == [4] * size
    assert sum(sent for _, sent in results) == size * 4 * activation * 2 * (size - 1) // size
