"""What each process of the tests with processes does. In a module of its own, so that a fresh process can import it."""

from __future__ import annotations

import copy
import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stretto
from mesh.models import ALL, GPT2, build, loss_of, words
from stretto.distributing import distribute
from stretto.mesh.cutting import tensor_parallel
from stretto.mesh.mesh import Mesh


def bytes_in_use() -> int:
    """Of memory that is not a file's, in the C library's heap and beside it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Anonymous:"))
    return int(line.split()[1]) << 10


def masks() -> dict[str, list[list[int]]]:
    """Which elements dropout drops, in the forwards of a block and in what is around it, and where generators are afterwards."""
    job = stretto.init()
    torch.manual_seed(100 + job.rank)
    seen: dict[str, list[list[int]]] = {"inside": [], "outside": []}

    def record(where: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            if module.training:
                seen[where].append((output == 0).int().flatten().tolist())

        return hook

    mesh = Mesh(model=job.world_size)
    model = tensor_parallel(build(lambda: GPT2(dropout=0.5)), mesh, ALL)
    for block in model.transformer["h"]:
        block.attn.attn_dropout.register_forward_hook(record("inside"))
        block.attn.resid_dropout.register_forward_hook(record("outside"))
        block.mlp.dropout.register_forward_hook(record("outside"))
    for step in range(2):
        torch.autograd.backward(loss_of(model, words(step)))
    seen["generator"] = [torch.randint(1 << 30, (4,)).tolist()]
    model.eval()
    model(words(0))
    seen["generator"].append(torch.randint(1 << 30, (4,)).tolist())
    stretto.shutdown()
    return seen


def recompute_with_dropout() -> list[float]:
    """Gradients of a model with dropout, in three ways: kept, recomputed in slices, recomputed by torch alone."""
    job = stretto.init()
    mesh = Mesh(model=job.world_size)
    gradients = []
    for way in ("kept", "slices", "torch"):
        model = build(lambda: GPT2(dropout=0.3))
        tensor_parallel(model, mesh, ALL)
        if way == "slices":
            stretto.checkpoint_activations(model, "transformer.h.*", partition=mesh.group("model"))
        if way == "torch":
            for block in model.transformer["h"]:
                plain = block.forward
                block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
        torch.manual_seed(7)
        torch.autograd.backward(loss_of(model, words(0)))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    stretto.shutdown()
    return [(gradients[0] - each).abs().max().item() for each in gradients[1:]]


def stored_bytes(blocks: int, numel: int) -> dict[str, float]:
    """Bytes in use between forward and backward, for each activation that a block begins with."""
    job = stretto.init()
    mesh = Mesh(model=job.world_size)
    found = {}
    for way in ("kept", "recomputed", "slices"):
        model = nn.Sequential(*[_Wide() for _ in range(blocks)])
        if way != "kept":
            stretto.checkpoint_activations(model, "*", partition=mesh.group("model") if way == "slices" else None)
        x = torch.ones(numel).requires_grad_()
        if way == "slices":
            found["first slices"] = _kept_by(model, x, blocks)
        found[way] = _kept_by(model, x, blocks)
        del model, x
    stretto.shutdown()
    return found


def _kept_by(model: nn.Module, x: Tensor, blocks: int) -> float:
    before = bytes_in_use()
    out = model(x).sum()
    kept = bytes_in_use() - before
    torch.autograd.backward(out)
    return kept / (blocks * x.nbytes)


def offloaded(device: str, blocks: int, numel: int) -> dict[str, tuple[float, float]]:
    """For each way to keep what blocks begin with: how many of these activations the device holds between forward and backward,
    and how far the gradient of the input is from the plain model's."""
    job = stretto.init()
    group = Mesh(model=job.world_size).group("model")
    ways: dict[str, dict[str, Any]] = {
        "recomputed": {}, "offloaded": {"offload": "cpu"}, "slices": {"partition": group},
        "slices, offloaded": {"partition": group, "offload": "cpu"},
    }  # fmt: skip
    x = torch.linspace(-1.0, 1.0, numel, device=device).requires_grad_()
    plain = nn.Sequential(*[_Wide() for _ in range(blocks)]).to(device)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    found = {}
    for way, options in ways.items():
        model = stretto.checkpoint_activations(copy.deepcopy(plain), "*", **options)
        for _ in range(2):  # the second time slices have an arena
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            out = model(x).sum()
            kept = (torch.cuda.memory_allocated() if device == "cuda" else 0) - before
            x.grad = None
            torch.autograd.backward(out)
            del out
        assert x.grad is not None
        found[way] = kept / (blocks * x.nbytes), (x.grad - expected).abs().max().item()
    stretto.shutdown()
    return found


class _Wide(nn.Module):
    """Keeps four tensors as large as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (((x * self.scale).sin() * 0.5).exp() + 1.0).sqrt()


class _Attention(nn.Module):
    """One map for each of q, k and v."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for each in (self.wq, self.wk, self.wv))
        out: Tensor = self.wo(nn.functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = _Attention(width, head_dim)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return out


def block_bytes(length: int, width: int) -> dict[str, Any]:
    """Bytes that this worker sends for one forward and backward of a block, and gradients of its input: cut by our layout, and by
    torch's styles of parallelism on our wire."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    job = stretto.init()
    dist: Any = torch.distributed
    dist.init_process_group("stretto")
    layout = stretto.Layout(("attention", stretto.Heads()), (_Block, stretto.FeedForward(up="up", down="down")))
    by_out, by_into = ("attention.wq", "attention.wk", "attention.wv", "up"), ("attention.wo", "down")
    plan = {**{name: ColwiseParallel() for name in by_out}, **{name: RowwiseParallel() for name in by_into}}
    models = {
        "ours": tensor_parallel(build(lambda: _Block(width, 64)), Mesh(model=job.world_size), layout),
        "torch": parallelize_module(build(lambda: _Block(width, 64)), init_device_mesh("cpu", (job.world_size,)), plan),
    }
    x = torch.randn(length, width, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}
    for name, model in models.items():
        for _ in range(2):  # the first time more is sent: inputs are compared, links are measured
            before, given = job.ledger.bytes_sent, x.clone().requires_grad_()
            torch.autograd.backward(model(given).square().mean())
        found[name], found[f"{name}, gradient"] = (
            job.ledger.bytes_sent - before,
            None if given.grad is None else given.grad.tolist(),
        )
        stretto.barrier()
    dist.destroy_process_group()
    return found


def cut_and_train(steps: int) -> float:
    """On our wire between processes: the loss after some steps, on two workers along the model and two along the data."""
    job = stretto.init()
    mesh = Mesh(data=2, model=2)
    model = tensor_parallel(build("gpt2", seed=job.rank), mesh, ALL)
    model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(steps):
        torch.autograd.backward(loss_of(model, words(step).chunk(2)[mesh.place("data")]))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = loss_of(model, words(steps)).item()
    stretto.shutdown()
    return loss
