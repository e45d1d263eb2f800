"""What each process of `test_gpu.py` does. In a module of its own, so that a fresh process can import it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto.distributing import engine_of


def gradients_of_three_steps(texts: list[str], device: str, bad_step: int = -1) -> dict[str, list[list[float]]]:
    """For each strategy: all gradients after each backward. In `bad_step` the last worker's batch is not a number."""
    job = stretto.init()
    found: dict[str, list[list[float]]] = {}
    for text in texts:
        model = _model().to(device)
        _, optimizer = stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
        found[text] = []
        for number in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + job.rank)).to(device)
            if number == bad_step and job.rank == job.world_size - 1:
                x = x * float("nan")
            loss: Tensor = model(x).pow(2).mean()
            torch.autograd.backward(loss)
            found[text].append([value for p in model.parameters() if p.grad is not None for value in p.grad.flatten().tolist()])
            if number != bad_step:
                optimizer.step()
            optimizer.zero_grad()
    stretto.shutdown()
    return found


def different_ways(device: str, strategy: str) -> str:
    """What a worker is told when rank 1 is at a barrier and the others are in backward."""
    job = stretto.init()
    model = _model().to(device)
    stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    x = torch.ones(4, 6, device=device)
    torch.autograd.backward(model(x).pow(2).mean())
    try:
        stretto.barrier() if job.rank == 1 else torch.autograd.backward(model(x).pow(2).mean())
    except stretto.RankMismatch as error:
        return str(error)
    return "not found out"


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view(parameter.shape))
    return model


def weights_after(texts: list[str], device: str, steps: int, other_stream: bool) -> dict[str, list[float]]:
    """For each strategy: all parameters after so many steps, and what its profile says. With `other_stream` every
    second forward and backward runs on a stream of its own."""
    job = stretto.init()
    found: dict[str, list[float]] = {}
    for text in texts:
        model = _model().to(device)
        _, optimizer = stretto.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01), text)
        streams = [torch.cuda.current_stream()] * 2
        if other_stream:
            streams[1] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for number in range(steps):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + job.rank)).to(device)
            streams[number % 2].wait_stream(streams[(number + 1) % 2])
            with torch.cuda.stream(streams[number % 2]):
                torch.autograd.backward(model(x).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        streams[0].wait_stream(streams[1])
        stretto.synchronize(model)
        found[text] = [value for p in model.parameters() for value in p.flatten().tolist()]
        profile = engine_of(model).training.profile
        found[f"{text}, seconds of backward"] = [] if profile is None else [profile.backward_s]
    stretto.shutdown()
    return found


def trained_in(texts: list[str], device: str, steps: int) -> dict[str, list[float]]:
    """For each strategy: what the job has come to, which is the mean of all models where each worker has its own: its loss
    relative to that of the beginning, and all parameters."""
    job = stretto.init()
    found: dict[str, list[float]] = {}
    test = torch.randn(64, 6, generator=torch.Generator().manual_seed(7)).to(device)
    for text in texts:
        model = _model().to(device)
        before = (model(test) - 1.0).pow(2).mean().item()
        _, optimizer = stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), text)
        for number in range(steps):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + job.rank)).to(device)
            torch.autograd.backward((model(x) - 1.0).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        stretto.consensus(model)
        stretto.barrier()
        stretto.release(model)
        assert all(p.device.type == device for p in model.parameters())
        after = (model(test) - 1.0).pow(2).mean().item()
        found[text] = [after / before, *(value for p in model.parameters() for value in p.flatten().tolist())]
    stretto.shutdown()
    return found


def in_slices(text: str, device: str, steps: int) -> dict[str, Any]:
    """What a worker has after some steps with `shard=Zero(...)`: all weights; where its optimizer's state and the slices that are
    stepped are, and whether pinned; and the bytes on the device for each parameter, between a backward and its step."""
    job = stretto.init()
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(50)]).to(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    _, optimizer = stretto.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3), text)
    held = 0
    for number in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * number + job.rank)).to(device)
        torch.autograd.backward(model(x).pow(2).mean())
        del x
        held = torch.cuda.memory_allocated() - before if device == "cuda" else 0
        optimizer.step()
        optimizer.zero_grad()
    sliced: Any = engine_of(model).training
    tensors: list[Tensor] = []
    for each in sliced._optimizers:
        for _, piece in each.pieces:
            state = each.state_of(piece)
            tensors += [piece.weight, state["exp_avg"], state["exp_avg_sq"]]
    found = {
        "weights": [value for weight in model.state_dict().values() for value in weight.flatten().tolist()],
        "where": sorted({tensor.device.type for tensor in tensors}),
        "pinned": all(tensor.is_pinned() for tensor in tensors),
        "bytes": held / num_parameters,
    }
    stretto.shutdown()
    return found
