"""Meshes and layouts: what they are, and what is refused before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from mesh.models import ALL, GPT2, build, encoder, mesh_of, sgd, words
from stretto import recipes
from stretto.distributing import distribute
from stretto.errors import ConfigurationError, RankMismatch
from stretto.job import Job
from stretto.mesh.cutting import tensor_parallel
from stretto.mesh.layout import Layout
from stretto.mesh.mesh import Mesh, nearest_that_fits
from stretto.mesh.placements import FeedForward, Heads, LinearMap, Vocabulary
from stretto.testing import run_jobs

# -- meshes -------------------------------------------------------------------------------------------------------------


def test_the_last_dimension_counts_fastest() -> None:
    def program(job: Job) -> Any:
        mesh = Mesh(data=2, model=3)
        places = (mesh.place("data"), mesh.place("model"))
        groups = [list(mesh.group(name).ranks) for name in ("data", "model")]
        return places, groups, mesh.size("model"), repr(mesh), list(mesh.group("model", "data").ranks)

    results = run_jobs(6, program)
    assert [places for places, *_ in results] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert results[4][1] == [[1, 4], [3, 4, 5]]
    assert results[0][2:] == (3, "Mesh(data=2, model=3)", [0, 1, 2, 3, 4, 5])


def test_collectives_of_its_groups_and_jobs() -> None:
    def program(job: Job) -> tuple[float, float, int]:
        mesh = mesh_of(job, data=2, model=2)
        along = stretto.all_reduce(torch.tensor([float(job.rank)]), "sum", "ring", group=mesh.group("model")).item()
        other = mesh.job("data").all_reduce(torch.tensor([float(job.rank)]), "sum", "ring").item()
        return along, other, mesh.job("data").rank

    assert run_jobs(4, program) == [(1.0, 2.0, 0), (1.0, 4.0, 0), (5.0, 2.0, 1), (5.0, 4.0, 1)]


def test_members_of_one_replica_draw_the_same_samples() -> None:
    def program(job: Job) -> list[int]:
        mesh = mesh_of(job, data=2, model=2)
        return list(stretto.Sampler(8, shuffle=False, job=mesh.job("data")))

    assert run_jobs(4, program) == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2


@pytest.mark.parametrize(
    ("asked", "workers", "nearest"),
    [
        ({"data": 3, "model": 2}, 4, {"data": 2, "model": 2}),
        ({"data": 2, "model": 2}, 8, {"data": 4, "model": 2}),
        ({"model": 4}, 6, {"model": 6}),
        ({"data": 2, "model": 2}, 7, {"data": 1, "model": 7}),
        ({"data": 2, "pipeline": 2, "model": 2}, 12, {"data": 3, "pipeline": 2, "model": 2}),
    ],
)
def test_the_nearest_mesh_that_fits(asked: dict[str, int], workers: int, nearest: dict[str, int]) -> None:
    found = nearest_that_fits(asked, workers)
    assert math.prod(found.values()) == workers
    assert found == nearest or found == {"data": 7, "model": 1}  # equally near


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mesh(data=3, model=2), r"3 x 2 = 6 places, and this job has 4 workers.*\nWrite Mesh\(data=2, model=2\)"),
        (lambda: Mesh(), "without a dimension"),
        (lambda: Mesh(data=0), "1 or more"),
        (lambda: Mesh(data=True), "1 or more"),
        (lambda: Mesh(data=2, model=2).group("modle"), "no dimension of Mesh"),
        (lambda: Mesh(data=2, model=2).place("x"), "'data', 'model'"),
    ],
)
def test_meshes_that_are_refused(make: Callable[[], Any], said: str) -> None:
    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match=said):
            make()

    run_jobs(4, program)


# -- layouts as values --------------------------------------------------------------------------------------------------


def test_a_layout_is_a_value() -> None:
    one = Layout(("**.mlp", FeedForward("model")), (nn.TransformerEncoderLayer, FeedForward("model")))
    assert one == Layout(*one.rules) and hash(one) == hash(Layout(*one.rules)) and one != recipes.megatron()
    assert repr(one) == (
        "Layout(('**.mlp', FeedForward(dimension='model', up=None, down=None, parts=1)), "
        "(TransformerEncoderLayer, FeedForward(dimension='model', up=None, down=None, parts=1)))"
    )
    assert one.over == ("model",) and recipes.mesh_tensorflow(vocab="columns", heads="rows").over == ("columns", "rows", "model")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Layout(), "cuts nothing"),
        (lambda: Layout("**.mlp"), "a rule is a pattern and a placement"),  # type: ignore[arg-type]
        (lambda: Layout(("**.mlp", "model")), "no placement"),  # type: ignore[arg-type]
        (lambda: Layout(("**.mlp", Heads)), "no placement"),  # type: ignore[arg-type]
        (lambda: Layout((3, Heads())), "a pattern is"),  # type: ignore[arg-type]
        (lambda: Layout(("**.mlp", FeedForward("data"))), "two dimensions cut over one of the mesh"),
        (lambda: recipes.mesh_tensorflow(batch="rows", d_ff="rows"), "two dimensions cut over one of the mesh"),
        (lambda: LinearMap(), "cuts nothing"),
        (lambda: LinearMap(out="model", into="model"), "the same dimension of the mesh"),
    ],
)
def test_layouts_that_cannot_be(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


def gpt2_of(**options: Any) -> Callable[[], nn.Module]:
    return lambda: GPT2(**options)


def odd_attention() -> nn.Module:
    return nn.Sequential(nn.MultiheadAttention(16, 4, add_bias_kv=True))


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


REFUSED: list[tuple[Callable[[], nn.Module], Layout, str]] = [
    (gpt2_of(heads=2), ALL, r"has 2 heads of 8 features each, which are not 4 equal shares.*\nWrite Mesh\(..., model=2\)"),
    (gpt2_of(words=13), ALL, "13 words.*not 4 equal shares"),
    (encoder, Layout(("**.self_atn", Heads())), "matches no module.*nearest"),
    (encoder, Layout(("**.self_attn", Heads("columns"))), "cuts over 'columns', and the mesh is Mesh"),
    (encoder, Layout(("**.self_attn", Heads()), ("body.layers.*", Heads())), "no attention that is known"),
    (encoder, Layout(("**.linear1", LinearMap(out="model")), ("**.*1", LinearMap(into="model"))), "would be cut twice"),
    (encoder, Layout(("**.layers.0", FeedForward()), ("**.linear1", LinearMap(into="model"))), "would both be cut over 'model'"),
    (encoder, Layout(("**.layers.0", FeedForward()), ("**.linear1", LinearMap(out="model"))), "would be cut twice"),
    (encoder, stretto.recipes.megatron(dimension="other"), "cuts over 'other'"),
    (encoder, Layout(("body", FeedForward(up="a", down="b"))), "'a' is not there"),
    (encoder, Layout(("**.norm1", Vocabulary())), "only nn.Embedding"),
    (encoder, Layout(("**.norm1", LinearMap(out="model"))), "only nn.Linear"),
    (gpt2_of(), Layout(("lm_head", Vocabulary())), "is the same tensor"),
    (gpt2_of(), Layout(("**.attn", Heads(fused="c_attn", out="none"))), "no attention that is known"),
    (odd_attention, Layout(("0", Heads())), "add_bias_kv"),
    (lambda: nn.Sequential(OwnLinear(4, 4)), Layout(("0", LinearMap(out="model"))), "only nn.Linear"),
    (lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), Layout(("0", Vocabulary())), "max_norm"),
    (lambda: nn.Sequential(nn.Linear(4, 4)), ALL, "cuts nothing of this Sequential"),
    (lambda: nn.Sequential(nn.Linear(4, 4, device="meta")), Layout(("0", LinearMap(out="model"))), "no memory yet"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_cut_is_refused_before_anything_is_done(number: int) -> None:
    make, layout, said = REFUSED[number]

    def program(job: Job) -> None:
        mesh, model = mesh_of(job, model=4), build(make)
        before = [p.clone() if not p.is_meta else p for p in model.parameters()]
        with pytest.raises(ConfigurationError, match=f"(?s){said}"):
            tensor_parallel(model, mesh, layout)
        assert all(p.is_meta or torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

    run_jobs(4, program)


def test_a_batch_that_is_over_no_dimension_is_refused() -> None:
    """Replicas would train apart without a word."""

    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match="along 'replicas' workers would train apart.\nWrite batch='replicas'"):
            tensor_parallel(build(encoder), mesh_of(job, replicas=2, model=2), recipes.megatron())
        model = tensor_parallel(build(encoder), mesh_of(job, replicas=2, model=2), recipes.megatron(batch="replicas"))
        distribute(model, sgd(model), stretto.Strategy(aggregate=stretto.AllReduce("ring")))

    run_jobs(4, program)


def test_one_that_is_refused_on_one_worker_is_refused_on_all() -> None:
    def program(job: Job) -> str:
        with pytest.raises(ConfigurationError) as caught:
            tensor_parallel(build(gpt2_of(heads=1 if job.rank else 4)), mesh_of(job, model=2), ALL)
        return str(caught.value)

    first, second = run_jobs(2, program)
    assert "refused on rank 1" in first and "1 heads" in first and second.startswith("Layout:")


def test_workers_that_mean_different_models_are_told() -> None:
    def program(job: Job) -> None:
        with pytest.raises(RankMismatch, match="differ|another number"):
            tensor_parallel(build(gpt2_of(words=12 if job.rank else 14)), mesh_of(job, model=2), ALL)

    run_jobs(2, program)


def test_workers_along_a_dimension_with_different_batches_are_told() -> None:
    def program(job: Job) -> None:
        model = tensor_parallel(build(gpt2_of()), mesh_of(job, model=2), ALL)
        with pytest.raises(RankMismatch, match="different inputs in its first forward"):
            model(words(job.rank))

    run_jobs(2, program)


# -- training -----------------------------------------------------------------------------------------------------------


class RowOptimizer(torch.optim.SGD):
    """Divides by the norm of each row."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-3)


@pytest.mark.parametrize(
    ("optimizer", "strategy", "said"),
    [
        (lambda model: stretto.LAMB(model.parameters(), lr=0.1), stretto.Strategy(), "depends on others of the same tensor"),
        (lambda model: RowOptimizer(model.parameters(), lr=0.1), stretto.Strategy(), "depends on others of the same tensor"),
        (lambda model: torch.optim.LBFGS(model.parameters()), stretto.Strategy(), "could not be found out"),
        (sgd, stretto.Strategy(sync=stretto.Asynchronous(), aggregate=stretto.ParameterServer()), "are of the whole job"),
        (sgd, stretto.Strategy(sync=stretto.Asynchronous(), aggregate=stretto.SharedMemory()), "are of the whole job"),
    ],
    ids=["LAMB", "rows", "LBFGS", "asynchronous", "Hogwild"],
)
def test_what_would_be_wrong_with_slices_is_refused(
    optimizer: Callable[[nn.Module], Any], strategy: stretto.Strategy, said: str
) -> None:
    def program(job: Job) -> None:
        model = tensor_parallel(build(gpt2_of()), mesh_of(job, data=2, model=2), ALL)
        with pytest.raises(ConfigurationError, match=said):
            distribute(model, optimizer(model), strategy)

    run_jobs(4, program)


def test_models_that_are_cut_are_not_averaged_over_their_slices() -> None:
    def program(job: Job) -> None:
        model = tensor_parallel(build(gpt2_of()), mesh_of(job, data=1, model=2), ALL)
        with pytest.raises(ConfigurationError, match="has another slice"):
            distribute(model, sgd(model), job=job)
        with pytest.raises(ConfigurationError, match="has been cut before"):
            tensor_parallel(model, mesh_of(job, model=2), ALL)
        with pytest.raises(ConfigurationError, match="has another slice"):
            distribute(model.transformer, sgd(model.transformer))

    run_jobs(2, program)


def test_a_model_that_is_distributed_is_not_cut() -> None:
    def program(job: Job) -> None:
        model = build(gpt2_of())
        distribute(model, sgd(model), stretto.Strategy(aggregate=stretto.AllReduce("ring")))
        with pytest.raises(ConfigurationError, match="distributed already"):
            tensor_parallel(model, mesh_of(job, model=2), ALL)

    run_jobs(2, program)
