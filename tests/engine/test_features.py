"""What real training loops do: BatchNorm, mixed precision, schedulers, two models, parameters that come and go, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from engine.worker import RING, assert_equal_everywhere, bytes_sent, data, mlp, seeded, start, state_of
from stretto.distributing import distribute, engine_of
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.testing import run_jobs

SIZE = 3


def reference(steps: int, size: int = SIZE, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        for rank in range(size):
            (model(data(rank, step)).pow(2).mean() / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13)


# -- buffers ----------------------------------------------------------------------------------------------------------


def with_batch_norm() -> nn.Module:
    model: nn.Module = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double())
    return model


@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_batch_norm_statistics_are_rank_0s_or_each_ranks_own(buffers: Any) -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = with_batch_norm()
        optimizer = start(job, model, buffers=buffers)
        for step in range(3):
            model(data(job.rank, step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if buffers == "broadcast":
            model(data(0, 3))  # everybody begins with rank 0's and adds the same
        return state_of(model)

    states = run_jobs(SIZE, program)
    parameters = [{name: value for name, value in state.items() if "running" not in name} for state in states]
    assert_equal_everywhere(parameters)
    equal = torch.equal(states[0]["1.running_mean"], states[1]["1.running_mean"])
    assert equal == (buffers == "broadcast")


def test_two_forwards_with_batch_norm_before_one_backward() -> None:
    """DDP ends here with "modified by an inplace operation"."""

    def program(job: Job) -> dict[str, Tensor]:
        model = with_batch_norm()
        optimizer = start(job, model)
        for step in range(3):
            (model(data(job.rank, step)).pow(2).mean() + model(data(job.rank, step + 9)).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_equal_everywhere(run_jobs(SIZE, program))


def test_buffers_of_every_dtype_and_shape_are_broadcast() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model: Any = mlp()
        model.register_buffer("mask", torch.tensor([job.rank == 0, True]))
        model.register_buffer("count", torch.tensor(job.rank))
        model.register_buffer("spread", torch.full((2, 3), float(job.rank)).t())
        model.register_buffer("nothing", torch.empty(0))
        model.register_buffer("short", torch.full((3,), job.rank, dtype=torch.float16))
        start(job, model)
        model.count.fill_(job.rank + 5)
        model(data(job.rank)).sum().backward()
        return state_of(model)

    states = run_jobs(SIZE, program)
    assert_equal_everywhere(states)
    assert int(states[1]["count"]) == 5 and bool(states[2]["mask"][0])


# -- mixed precision, schedulers, clipping ----------------------------------------------------------------------------


def test_a_grad_scaler_skips_the_same_step_everywhere() -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], list[float], int]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
        optimizer = start(job, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales, skipped = [], 0
        for step in range(6):
            before = state_of(model)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(data(job.rank, step).float()).float().pow(2).mean()
            if step == 2 and job.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            skipped += all(torch.equal(value, before[name]) for name, value in state_of(model).items())
        return state_of(model), scales, skipped

    results = run_jobs(SIZE, program)
    assert_equal_everywhere([state for state, _, _ in results])
    assert all(scales == results[0][1] and skipped == 1 for _, scales, skipped in results)
    assert results[0][1][2] == results[0][1][1] / 2


def test_a_learning_rate_scheduler_goes_on_working() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=6)
        distribute(model, optimizer, RING, job=job)
        for step in range(5):
            for rank in range(SIZE) if job.world_size == 1 else [job.rank]:
                (model(data(rank, step)).pow(2).mean() / (SIZE if job.world_size == 1 else 1)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return state_of(model)

    states = run_jobs(SIZE, program)
    assert_equal_everywhere(states)
    assert_close(states[0], run_jobs(1, program)[0])


# -- two models -------------------------------------------------------------------------------------------------------


def test_two_models_in_one_process_a_gan() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        size, ranks = (1, range(SIZE)) if job.world_size == 1 else (SIZE, [job.rank])
        share = 1.0 if size > 1 else 1 / SIZE
        maker = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), 1)
        critic = mlp()
        maker_optimizer, critic_optimizer = start(job, maker), start(job, critic)
        for step in range(4):
            for rank in ranks:
                real, noise = data(rank, step), data(rank, step + 100)
                loss = critic(maker(noise).detach()).mean() - critic(real).mean()
                (loss * share).backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()
            for rank in ranks:
                (-critic(maker(data(rank, step + 200))).mean() * share).backward()  # combines the critic's too; it is not stepped
            maker_optimizer.step()
            maker_optimizer.zero_grad()
            critic_optimizer.zero_grad()
        return {**state_of(maker), **{f"critic {name}": value for name, value in state_of(critic).items()}}

    states = run_jobs(SIZE, program)
    assert_equal_everywhere(states)
    assert_close(states[0], run_jobs(1, program)[0])


def test_an_iterable_dataset() -> None:
    class Stream(IterableDataset[Tensor]):
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size

        def __iter__(self) -> Iterator[Tensor]:
            for number in range(self.rank, 36, self.size):
                yield data(number, length=1)[0]

    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = start(job, model)
        for x in DataLoader(Stream(job.rank, job.world_size), batch_size=12 // job.world_size):
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    states = run_jobs(SIZE, program)
    assert_equal_everywhere(states)
    assert_close(states[0], run_jobs(1, program)[0])


# -- parameters that come and go --------------------------------------------------------------------------------------


def test_parameters_are_frozen_and_unfrozen_between_steps() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        ranks = range(SIZE) if job.world_size == 1 else [job.rank]
        model = mlp()
        model[0].requires_grad_(False)
        optimizer = start(job, model)
        for step in range(6):
            model[0].requires_grad_(step >= 2)
            model[2].weight.requires_grad_(step != 4)
            for rank in ranks:
                (model(data(rank, step)).pow(2).mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    states = run_jobs(SIZE, program)
    assert_equal_everywhere(states)
    assert_close(states[0], run_jobs(1, program)[0])


def test_a_layer_and_its_parameter_group_added_later_begin_alike() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        ranks = range(SIZE) if job.world_size == 1 else [job.rank]
        model = mlp()
        optimizer = start(job, model)
        for step in range(4):
            if step == 2:
                model.append(seeded(lambda: nn.Linear(1, 1).double(), seed=job.rank))
                optimizer.add_param_group({"params": model[5].parameters(), "lr": 0.01})
            for rank in ranks:
                (model(data(rank, step)).pow(2).mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    states = run_jobs(SIZE, program)
    assert_equal_everywhere(states)
    assert_close(states[0], run_jobs(1, program)[0])


def test_a_model_converted_after_distribute_goes_on() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        start(job, model)
        model(data(job.rank)).sum().backward()
        model.zero_grad()
        model.float()
        model(data(job.rank).float()).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    gradients = run_jobs(2, program)
    assert_equal_everywhere(gradients)
    assert all(gradient.dtype == torch.float32 for gradient in gradients[0].values())


# -- starting alike ---------------------------------------------------------------------------------------------------


def test_state_and_options_of_rank_0s_optimizer_are_everybodys() -> None:
    def program(job: Job) -> Any:
        model = mlp(job.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + job.rank), betas=(0.8, 0.9))
        if job.rank == 0:
            model(data(0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        distribute(model, optimizer, RING, job=job)
        assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        state = optimizer.state_dict()["state"]
        return {f"{n} {key}": torch.as_tensor(value) for n, entry in state.items() for key, value in entry.items()}

    states = run_jobs(SIZE, program)
    assert len(states[0]) == 3 * 6
    assert_equal_everywhere(states)


def test_optimizer_state_that_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    def program(job: Job) -> None:
        model: Any = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if job.rank == 0:
            optimizer.state[model[0].weight]["odd"] = object()
        with pytest.raises(ConfigurationError, match="the state of rank 0's SGD cannot be sent"):
            distribute(model, optimizer, RING, job=job)

    run_jobs(SIZE, program)


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_a_plain_model_and_may_be_distributed_again() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        average = copy.deepcopy(model)
        before = bytes_sent(job)
        average(data(job.rank)).sum().backward()
        assert bytes_sent(job) == before
        with pytest.raises(ConfigurationError, match="has not been distributed"):
            engine_of(average)
        model(data(job.rank)).sum().backward()
        optimizer.step()
        start(job, average)
        average.zero_grad()
        average(data(job.rank)).sum().backward()
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(one.grad, other.grad)

    run_jobs(SIZE, program)


def test_a_distributed_model_can_be_saved_pickled_and_loaded() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        keys = list(mlp().state_dict())
        assert list(model.state_dict()) == keys
        model(data(job.rank)).sum().backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        plain = mlp(5)
        plain.load_state_dict(saved["model"])
        assert_equal_everywhere([state_of(model), state_of(plain)])
        torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9).load_state_dict(saved["optimizer"])
        whole = pickle.loads(pickle.dumps(model))
        before = bytes_sent(job)
        whole(data(job.rank)).sum().backward()
        assert bytes_sent(job) == before

    run_jobs(2, program)


def test_distribute_returns_the_same_objects() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert distribute(model, optimizer, RING, job=job) == (model, optimizer)
        assert type(model) is nn.Sequential

    run_jobs(2, program)


def test_the_strategy_may_be_given_as_text_and_the_job_be_the_current_one() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        distribute(model, optimizer, "Strategy(aggregate=AllReduce('ring'), schedule=WaitFree())")
        for step in range(2):
            model(data(job.rank, step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_close(run_jobs(SIZE, program)[0], state_of(reference(2)[0]))


def test_a_model_of_a_job_that_is_over_may_be_trained_in_another() -> None:
    model = mlp()

    def program(job: Job) -> None:
        mine = model if job.rank == 0 else mlp()
        optimizer = start(job, mine)
        mine(data(job.rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run_jobs(2, program)
    run_jobs(3, program)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_jobs(1, lambda job: distribute(model, optimizer, RING, job=job))
    model(data(0)).sum().backward()  # no hook is left that would look for a job
    optimizer.step()
