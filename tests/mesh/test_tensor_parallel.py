"""A model that is cut over workers trains as it does in one process."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stretto
from largest import largest
from mesh.models import KINDS, WIDTH, WORDS, GPT2Block, build, copied, distance, loss_of, mesh_of, sgd, train, words
from stretto.distributing import distribute
from stretto.job import Job
from stretto.mesh.cutting import cuts_of, tensor_parallel
from stretto.mesh.tensor_cut import gathered
from stretto.strategy import Strategy
from stretto.testing import run_jobs

STEPS = 20
MESHES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
QUICK = {("gpt2", 1, 4), ("gpt2", 2, 2), ("encoder", 2, 2), ("llama", 2, 1), ("llama", 2, 4), ("maps", 1, 2)}
QUICK |= {("encoder, norm first", 1, 2), ("feed-forward alone", 1, 2), ("heads alone", 1, 1)}
CELLS = [
    pytest.param(kind, data, model, marks=[] if (kind, data, model) in QUICK else [pytest.mark.slow])
    for kind in KINDS
    for data, model in MESHES
]


@cache
def alone(kind: str, steps: int = STEPS) -> dict[str, Tensor]:
    """One process, the whole batch, nothing cut."""
    model = build(kind)
    train(model, sgd(model), [words(step) for step in range(steps)])
    return copied(model.state_dict())


def together(job: Job, kind: str, data: int, size: int, strategy: Strategy | None = None, steps: int = STEPS) -> Any:
    mesh = mesh_of(job, data=data, model=size)
    model = tensor_parallel(build(kind, seed=job.rank), mesh, KINDS[kind][1])
    model, optimizer = distribute(model, sgd(model), strategy or Strategy(aggregate=stretto.AllReduce("ring")))
    place = mesh.place("data")
    train(model, optimizer, [words(step).chunk(data)[place] for step in range(steps)])
    return copied(model.state_dict()), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("kind", "data", "model"), CELLS)
def test_a_model_that_is_cut_trains_as_in_one_process(kind: str, data: int, model: int) -> None:
    results = run_jobs(data * model, together, kind, data, model)

    for state, _ in results:
        assert distance(state, alone(kind)) < 1e-5
        assert distance(state, results[0][0]) == 0.0  # all workers, whatever they have of it


def test_every_way_to_cut_is_quick_somewhere() -> None:
    assert {kind for kind, _, _ in QUICK} == set(KINDS)
    assert {(data, model) for _, data, model in QUICK} == set(MESHES)


def test_each_worker_holds_its_share_of_what_is_cut() -> None:
    whole = sum(p.numel() for p in build("gpt2").parameters())
    for size in (2, 4):
        held = [numel for _, numel in run_jobs(size, together, "gpt2", 1, size, None, 1)]
        # Norms, places and the biases that are added after a sum are everywhere.
        block = build("gpt2").transformer["h"][0]
        everywhere = sum(p.numel() for p in build("gpt2").transformer["wpe"].parameters()) + 5 * 2 * 16 + 2 * (16 + 16)
        assert block is not None and held == [(whole - everywhere) // size + everywhere] * size


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(aggregate=stretto.Hierarchy()),
        Strategy(compress=stretto.ErrorFeedback(stretto.Sign())),
        Strategy(compress=stretto.PowerSGD(2)),
        Strategy(schedule=stretto.Priority()),
        Strategy(sync=stretto.LocalSGD(2)),
        Strategy(sync=stretto.StaleSynchronous(1)),
        Strategy(shard=stretto.Zero(2)),
    ],
    ids=lambda strategy: str(strategy)[9:60],
)
def test_the_data_dimension_trains_with_any_strategy_of_all_reduces(strategy: Strategy) -> None:
    """Parameters that are not cut stay equal along the dimension over which others are."""

    def program(job: Job) -> tuple[dict[str, Tensor], float]:
        mesh = mesh_of(job, data=2, model=2)
        model = tensor_parallel(build("gpt2", seed=job.rank), mesh, KINDS["gpt2"][1])
        first = loss_of(model, words(0)).item()
        model, optimizer = distribute(model, sgd(model), strategy)
        train(model, optimizer, [words(step).chunk(2)[mesh.place("data")] for step in range(6)])
        stretto.synchronize(model)
        whole = {name: p.detach().clone() for name, p in model.named_parameters() if "ln_" in name or "wpe" in name}
        return whole, first - loss_of(model, words(0)).item()

    (a, gain), (b, _), (c, _), (d, _) = run_jobs(4, program)
    assert distance(a, b) == 0.0 and distance(c, d) == 0.0 and gain > 0.0


def test_gradients_are_those_of_one_process() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = tensor_parallel(build("gpt2", dtype=torch.float64), mesh_of(job, model=2), KINDS["gpt2"][1])
        torch.autograd.backward(loss_of(model, words(0)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        return copied(model.state_dict())

    model = build("gpt2", dtype=torch.float64)
    torch.autograd.backward(loss_of(model, words(0)))
    expected = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    for found in run_jobs(2, program):
        assert distance(found, expected) < 1e-12


def test_it_can_be_differentiated_twice() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        torch.autograd.backward(gradient.square().sum())
        return gradient.detach()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    x = torch.randn(3, 6, dtype=torch.float64)
    layout = stretto.Layout(("0", stretto.LinearMap(out="model")), ("2", stretto.LinearMap(into="model")))

    def program(job: Job) -> Any:
        model = tensor_parallel(build(make, dtype=torch.float64), mesh_of(job, model=2), layout)
        gradient = penalty(model, x.clone().requires_grad_())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        return gradient, copied(model.state_dict())

    plain = build(make, dtype=torch.float64)
    expected = penalty(plain, x.clone().requires_grad_())
    for gradient, found in run_jobs(2, program):
        assert torch.allclose(gradient, expected, rtol=1e-10)
        assert distance(found, {name: p.grad for name, p in plain.named_parameters()}) < 1e-10


def test_a_matrix_is_cut_over_two_dimensions_of_the_mesh() -> None:
    layout = stretto.Layout(("body.2", stretto.LinearMap(out="rows", into="columns")), ("body.0", stretto.LinearMap(out="rows")))

    def program(job: Job) -> Any:
        mesh = mesh_of(job, rows=2, columns=2)
        model = tensor_parallel(build("maps", seed=job.rank), mesh, layout)
        shape = tuple(model.body[2].weight.shape)
        train(model, sgd(model), [words(step) for step in range(5)])
        return copied(model.state_dict()), shape

    for state, shape in run_jobs(4, program):
        assert shape == (4, 4) and distance(state, alone("maps", 5)) < 1e-5


def test_any_legal_layout_of_mesh_tensorflow_gives_the_same_loss() -> None:
    choices: list[dict[str, Any]] = [
        {"heads": None, "vocab": None}, {"d_ff": None, "vocab": None}, {"heads": None, "d_ff": None},
        {"heads": "other", "d_ff": "model", "vocab": "other"},
    ]  # fmt: skip
    layouts = [stretto.recipes.mesh_tensorflow(batch=None, **each) for each in choices]

    def program(job: Job) -> list[float]:
        mesh = mesh_of(job, other=2, model=2)
        models = [build("encoder") for _ in layouts]
        job.barrier()  # ranks are threads with one generator, and dropout of one that is ahead would draw from it
        return [loss_of(tensor_parallel(model, mesh, each), words(0)).item() for model, each in zip(models, layouts, strict=True)]

    expected = loss_of(build("encoder"), words(0)).item()
    for losses in run_jobs(4, program):
        assert losses == pytest.approx([expected] * len(layouts), abs=1e-6)


RING = Strategy(aggregate=stretto.AllReduce("ring"))


@pytest.mark.parametrize(
    ("data", "steps", "strategy"),
    [
        (1, 4, RING),
        *(pytest.param(2, STEPS, each, marks=pytest.mark.slow) for each in (RING, Strategy(shard=stretto.Zero(1)))),
    ],
    ids=["1 x 2 x 2", "2 x 2 x 2", "2 x 2 x 2, Zero(1)"],
)
def test_stages_of_a_pipeline_are_cut_too(data: int, steps: int, strategy: Strategy) -> None:
    """data x pipeline x model: every product of one mesh."""

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), GPT2Block(), GPT2Block(), nn.Linear(WIDTH, WORDS))

    def loss(out: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), batch.roll(1, 1).flatten())

    layout = stretto.Layout(("*.attn", stretto.Heads()), ("*.mlp", stretto.FeedForward()))

    def program(job: Job) -> dict[str, Tensor]:
        mesh = mesh_of(job, pipeline=2, data=data, model=2)
        layers = tensor_parallel(build(make), mesh, layout)
        pipeline = stretto.pipeline(nn.Sequential(*layers), 2, 2, cut=["2"], group=mesh.group("pipeline", "data"))
        module, optimizer = distribute(pipeline.module, sgd(pipeline.module), strategy)
        for step in range(steps):
            batch = words(step).chunk(data)[mesh.place("data")]
            pipeline.forward_backward(batch, batch, loss)
            stretto.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(stretto.CheckpointError, match="each of its workers has slices"):
            pipeline.save("never.pt", optimizer)
        return {name: gathered(p.detach(), cuts_of(p)).clone() for name, p in module.named_parameters()}

    plain = build(make)
    optimizer = sgd(plain)
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss(plain(words(step)), words(step)))
        assert nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1
        optimizer.step()
    expected = copied(dict(plain.named_parameters()))
    results = run_jobs(4 * data, program)
    for found in results:
        assert distance(found, {name: expected[name] for name in found}) < 1e-5
    assert set().union(*results) == set(expected)


def test_a_copy_of_a_model_that_is_cut_computes_the_same() -> None:
    def program(job: Job) -> bool:
        model = tensor_parallel(build("encoder"), mesh_of(job, model=2), KINDS["encoder"][1])
        twin = copy.deepcopy(model)
        assert distance(copied(twin.state_dict()), copied(model.state_dict())) == 0.0
        return torch.equal(model(words(0)), twin(words(0)))

    assert run_jobs(2, program) == [True, True]


def test_it_evaluates_as_in_one_process() -> None:
    """Without the kernels that torch has for whole layers in inference."""
    plain = build("encoder").eval()

    def program(job: Job) -> float:
        model = tensor_parallel(build("encoder"), mesh_of(job, model=2), KINDS["encoder"][1]).eval()
        with torch.no_grad():
            return float((model(words(0)) - plain(words(0))).abs().max())

    assert largest(run_jobs(2, program)) < 1e-6
