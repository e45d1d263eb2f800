"""SyncBatchNorm: workers on shards compute what one process computes on the whole batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import stretto
from engine.worker import RING, assert_equal_everywhere, seeded, start, state_of
from stretto.distributing import distribute, join, weight
from stretto.errors import ConfigurationError, PeerLost, RankMismatch
from stretto.job import Job
from stretto.sync_batch_norm import SyncBatchNorm
from stretto.testing import run_jobs
from stretto.timeouts import Timeouts

SIZE = 3
EVEN = (6, 6, 6)
UNEVEN = (7, 0, 2)


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, momentum=None))


def model_of(build: Callable[[], nn.Module] = convolutions, *, convert: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    model = seeded(build).to(dtype)
    return SyncBatchNorm.convert_sync_batchnorm(model) if convert else model


def images(batches: tuple[int, ...], step: int = 0, offset: float = 0.0) -> tuple[Tensor, ...]:
    """One batch per worker. Their means differ, so statistics of one's own would be found out."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(batches), 2, 6, 5, generator=generator) + offset
    return tuple(batch + rank for rank, batch in enumerate(torch.split(x, list(batches))))


class Trained(NamedTuple):
    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> Trained:
    """What the last of the steps saw, and the state after it. A loss that is a mean over samples, and curved."""
    for batch in batches:
        optimizer.zero_grad()
        x = batch.clone().requires_grad_()
        output = model(x)
        output.sin().square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    assert x.grad is not None
    return Trained(output.detach(), x.grad, gradients, state_of(model))


def in_one_process(batches: tuple[int, ...], steps: int, dtype: torch.dtype = torch.float32) -> Trained:
    model = model_of(convert=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train(model, optimizer, [torch.cat(images(batches, step)).to(dtype) for step in range(steps)])


def in_three_workers(batches: tuple[int, ...], steps: int, dtype: torch.dtype = torch.float32) -> list[Trained]:
    def program(job: Job) -> Trained:
        model = model_of(dtype=dtype)
        optimizer = start(job, model)
        weight(float(batches[job.rank]))
        return train(model, optimizer, [images(batches, step)[job.rank].to(dtype) for step in range(steps)])

    return run_jobs(SIZE, program)


# -- equal to one process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_workers_on_shards_equal_one_process_on_the_whole_batch(batches: tuple[int, ...]) -> None:
    expected = in_one_process(batches, steps=3)
    workers = in_three_workers(batches, steps=3)

    def close(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)

    close(torch.cat([worker.output for worker in workers]), expected.output)
    # A worker's loss is a mean over its own samples: its share of the gradient of the mean over all of them is n_r / n.
    shares = [worker.input_gradient * (n / sum(batches)) for worker, n in zip(workers, batches, strict=True)]
    close(torch.cat(shares), expected.input_gradient)
    for worker in workers:
        assert worker.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            close(worker.gradients[name], gradient)
        for name, value in expected.state.items():
            close(worker.state[name], value)
    assert_equal_everywhere([worker.state for worker in workers])


def test_in_float64_they_are_equal_to_1e_12() -> None:
    """So what is left in float32 is rounding, and not a term of the formula."""
    expected = in_one_process(UNEVEN, 2, torch.float64)
    for worker in in_three_workers(UNEVEN, 2, torch.float64):
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(worker.gradients[name], gradient, rtol=1e-12, atol=1e-13)


def test_a_mean_far_from_zero_does_not_cancel_the_variance() -> None:
    def program(job: Job) -> Tensor:
        return model_of(lambda: nn.BatchNorm2d(2))(images(EVEN, offset=1e4)[job.rank]).detach()  # type: ignore[no-any-return]

    whole = torch.cat(images(EVEN, offset=1e4)).double()
    expected = nn.BatchNorm2d(2).double()(whole).detach().float()
    torch.testing.assert_close(torch.cat(run_jobs(SIZE, program)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_out_as_it_went_in_and_is_computed_in_float32(dtype: torch.dtype) -> None:
    def program(job: Job) -> tuple[Tensor, Tensor]:
        layer = model_of(lambda: nn.BatchNorm2d(2))
        x = images(EVEN)[job.rank].to(dtype).requires_grad_()
        y = layer(x)
        y.float().pow(3).sum().backward()
        assert x.grad is not None and x.grad.dtype == y.dtype == dtype and layer.weight.grad.dtype == torch.float32
        return y.detach(), layer.running_var

    outputs, variances = zip(*run_jobs(SIZE, program), strict=True)
    layer = nn.BatchNorm2d(2)
    expected = layer(torch.cat(images(EVEN)).to(dtype).float()).to(dtype)
    torch.testing.assert_close(torch.cat(outputs), expected)
    torch.testing.assert_close(variances[0], layer.running_var)


# -- equal to BatchNorm, bit for bit ----------------------------------------------------------------------------------


def assert_same_bits(job: Job, *, training: bool, size: int) -> None:
    ours, plain = model_of(), model_of(convert=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, plain)]
    if size == 1:
        distribute(ours, optimizers[0], RING, job=job)
    for model in (ours, plain):
        model.train(training)
    found, expected = (
        train(model, optimizer, list(images((5, 4)))) for model, optimizer in zip((ours, plain), optimizers, strict=True)
    )
    assert torch.equal(found.output, expected.output) and torch.equal(found.input_gradient, expected.input_gradient)
    assert_equal_everywhere([found.gradients, expected.gradients])
    assert_equal_everywhere([found.state, expected.state])


def test_a_job_of_one_has_the_bits_of_batch_norm() -> None:
    run_jobs(1, lambda job: assert_same_bits(job, training=True, size=1))


def test_evaluation_has_the_bits_of_batch_norm_and_sends_nothing() -> None:
    def program(job: Job) -> int:
        assert_same_bits(job, training=False, size=2)
        assert job.wire is not None
        return job.wire.bytes_sent

    assert run_jobs(2, program) == [0, 0]


def test_without_a_job_evaluation_works_and_training_is_an_error() -> None:
    model = model_of()
    model.eval()(images((2,))[0])
    with pytest.raises(ConfigurationError, match="stretto.init"):
        model.train()(images((2,))[0])


# -- cost -------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_modules_text() -> None:
    def program(job: Job) -> tuple[int, int]:
        y = model_of(lambda: nn.BatchNorm1d(50))(torch.randn(4, 50, requires_grad=True))
        forward = job.ledger.bytes_sent
        y.square().sum().backward()
        return forward, job.ledger.bytes_sent - forward

    assert run_jobs(2, program) == [(8 * (2 * 50 + 1), 16 * 50)] * 2


# -- with the engine, and other features ------------------------------------------------------------------------------


def test_two_forwards_before_one_backward_and_a_backward_twice() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = model_of()
        optimizer = start(job, model)
        for step in range(2):
            (model(images(EVEN, step)[job.rank]).sin().sum() + model(images(EVEN, 9)[job.rank]).sum()).backward()
            optimizer.step()
            loss = model(images(EVEN, step)[job.rank]).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_equal_everywhere(run_jobs(SIZE, program))


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing_gradients_are_the_same_and_statistics_count_twice(reentrant: bool) -> None:
    def program(job: Job, checkpointing: bool) -> tuple[dict[str, Tensor], int]:
        model = model_of()
        start(job, model)
        x = images(EVEN)[job.rank].requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointing else model(x)
        y.sin().square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}, int(model[1].num_batches_tracked)

    plainly = run_jobs(SIZE, program, False)
    again = run_jobs(SIZE, program, True)
    assert_equal_everywhere([gradients for gradients, _ in (*plainly, *again)])
    assert [count for _, count in (*plainly, *again)] == [1] * SIZE + [2] * SIZE


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own: dynamo looks at it where a graph breaks
def test_a_compiled_model_breaks_its_graph_there_and_computes_the_same() -> None:
    def program(job: Job, compiled: bool) -> Tensor:
        model = model_of()
        run = torch.compile(model, backend="eager") if compiled else model
        y = run(images(EVEN)[job.rank])
        y.sin().sum().backward()
        return model[0].weight.grad  # type: ignore[no-any-return]

    plainly, compiled = run_jobs(SIZE, program, False), run_jobs(SIZE, program, True)
    torch.testing.assert_close(compiled, plainly)


def test_without_affine_parameters_and_without_running_statistics() -> None:
    def bare() -> nn.Module:
        return nn.BatchNorm2d(2, affine=False, track_running_stats=False)

    def program(job: Job) -> Tensor:
        layer = model_of(bare)
        layer(images(EVEN)[job.rank])
        return layer(images(EVEN)[job.rank])  # type: ignore[no-any-return]

    torch.testing.assert_close(torch.cat(run_jobs(SIZE, program)), bare()(torch.cat(images(EVEN))), rtol=1e-6, atol=1e-6)


def test_a_copy_and_a_pickle_are_tied_to_no_job() -> None:
    def program(job: Job) -> Any:
        model = model_of()
        model(images(EVEN)[job.rank])
        copied = copy.deepcopy(model)
        copied(images(EVEN)[job.rank])  # of channels of its own, alike on all workers
        return copied, pickle.loads(pickle.dumps(model))

    for copied, loaded in run_jobs(SIZE, program):
        assert_equal_everywhere([state_of(copied.eval()), state_of(copied)])
        assert loaded[1]._link is None and loaded[1].running_mean is not None


def test_a_layer_of_a_job_that_is_over_works_in_the_next() -> None:
    layers = [model_of(lambda: nn.BatchNorm2d(2)) for _ in range(SIZE)]

    def program(job: Job, size: int) -> Tensor:
        return layers[job.rank](images(EVEN[:size])[job.rank])  # type: ignore[no-any-return]

    run_jobs(SIZE, program, SIZE)
    expected = nn.BatchNorm2d(2)(torch.cat(images(EVEN[:2])))
    torch.testing.assert_close(torch.cat(run_jobs(2, program, 2)), expected, rtol=1e-6, atol=1e-6)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def train_on_the_gpu(batches: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """In a process of its own: autograd has one thread per GPU and process, which ranks in threads would have to share."""
    job = stretto.init()
    x = images(batches)[job.rank].cuda()
    model = model_of().cuda()
    optimizer = start(job, model)
    weight(float(len(x)))
    trained = train(model, optimizer, [x, x])
    stretto.shutdown()
    return trained.gradients["0.weight"].flatten().tolist(), trained.state["1.running_var"].tolist()


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_processes_on_a_gpu_equal_one_process_on_the_whole_batch() -> None:
    batches = (7, 2)
    expected = model_of(convert=False).cuda()
    whole = torch.cat(images(batches)).cuda()
    alone = train(expected, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), [whole, whole])
    for gradient, variance in stretto.launch(train_on_the_gpu, 2, batches, timeout_s=100):
        torch.testing.assert_close(torch.tensor(gradient), alone.gradients["0.weight"].flatten().cpu(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(torch.tensor(variance), alone.state["1.running_var"].cpu(), rtol=1e-4, atol=1e-5)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_layers_called_in_another_order_are_an_error_on_all_workers() -> None:
    def program(job: Job) -> str:
        model = model_of(lambda: nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2)))
        order = (0, 1) if job.rank == 0 else (1, 0)
        with pytest.raises(RankMismatch) as caught:
            for index in order:
                model[index](images(EVEN)[job.rank])
        return str(caught.value)

    for text in run_jobs(2, program):
        assert "SyncBatchNorm '0'" in text and "SyncBatchNorm '1'" in text


def test_inside_join_it_is_an_error() -> None:
    def program(job: Job) -> None:
        model = model_of()
        start(job, model)
        with pytest.raises(ConfigurationError, match="run out of batches"), join(model):
            model(images(EVEN)[job.rank])

    run_jobs(2, program)


def test_one_value_per_channel_over_all_workers_is_an_error_on_all_of_them() -> None:
    def program(job: Job) -> None:
        layer = model_of(lambda: nn.BatchNorm1d(3))
        with pytest.raises(ValueError, match="together have 1"):
            layer(torch.randn(1 if job.rank == 1 else 0, 3))
        assert int(layer.num_batches_tracked) == 0
        layer(torch.randn(1, 3))  # one each is enough, which BatchNorm would refuse

    run_jobs(2, program)


@pytest.mark.parametrize("shape", [(5,), (5, 4), (5, 4, 2)])
def test_another_number_of_channels_is_an_error_before_anything_is_sent(shape: tuple[int, ...]) -> None:
    def program(job: Job) -> int:
        with pytest.raises(ValueError, match=r"takes \(N, 3, ...\)"):
            SyncBatchNorm(3)(torch.randn(shape))
        return job.ledger.bytes_sent

    assert run_jobs(2, program) == [0, 0]


def test_a_second_derivative_is_refused() -> None:
    def program(job: Job) -> None:
        x = torch.randn(4, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(SyncBatchNorm(3)(x).sin().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()  # type: ignore[no-untyped-call]

    run_jobs(2, program)


def test_a_worker_that_leaves_is_named() -> None:
    def program(job: Job) -> int | None:
        if job.rank == 1:
            return None
        with pytest.raises(PeerLost) as caught:
            SyncBatchNorm(3)(torch.randn(4, 3))
        return caught.value.rank

    assert run_jobs(2, program, timeouts=Timeouts(arrive_s=20.0)) == [1, None]


# -- converting -------------------------------------------------------------------------------------------------------


def test_converting_keeps_objects_parameters_and_hooks_and_leaves_other_layers() -> None:
    shared = nn.BatchNorm1d(4)
    inner = nn.BatchNorm3d(2, eps=0.5)
    model = nn.Sequential(shared, nn.ModuleDict({"inner": inner}), shared, nn.InstanceNorm1d(4), nn.Linear(4, 4))
    calls: list[int] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    before, parameters, state = list(model.modules()), list(model.parameters()), state_of(model)

    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert all(one is other for one, other in zip(model.modules(), before, strict=True))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert_equal_everywhere([state, state_of(model)])
    assert [type(module) for module in before if isinstance(module, _BatchNorm)] == [SyncBatchNorm] * 2
    assert repr(inner).startswith("SyncBatchNorm(2, eps=0.5")
    shared.eval()(torch.randn(2, 4))
    assert calls == [1]


def test_converting_takes_a_layer_by_itself_torchs_own_and_one_that_is_converted() -> None:
    for layer in (nn.BatchNorm2d(3), nn.SyncBatchNorm(3), SyncBatchNorm(3)):
        assert type(SyncBatchNorm.convert_sync_batchnorm(layer)) is SyncBatchNorm


class BatchNormAndActivation(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize("layer, why", [(nn.LazyBatchNorm1d, "lazy"), (lambda: BatchNormAndActivation(3), "forward of its own")])
def test_what_cannot_be_converted_leaves_the_model_as_it_was(layer: Callable[[], nn.Module], why: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), layer())
    with pytest.raises(ConfigurationError, match=why):
        SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
