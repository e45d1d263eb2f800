"""The models whose training step is timed: one with few large parameters, a transformer, and two with many small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """Many layers in a row whose values neither vanish nor explode."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.div_(count)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.attend(self.before_attention(x)).chunk(3, dim=-1)
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (each.view(split).transpose(1, 2) for each in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.before_mlp(x))))


class Gpt(nn.Module):
    """A byte-level GPT: 256 tokens, learnt positions."""

    def __init__(self, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Workload:
    """How to make a model and one worker's batch, and the loss. `text` is what the table says."""

    text: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def next_byte(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def gpt(text: str, width: int, heads: int, depth: int, batch: int, length: int) -> Workload:
    return Workload(text, lambda: Gpt(width, heads, depth, length), lambda: torch.randint(256, (batch, length)), next_byte)


def gpt2(rows: int, length: int) -> Workload:
    """Hugging Face's, with random weights: nothing is downloaded."""
    return Workload(
        f"GPT-2, 124 M parameters, batch {rows} x {length}", _hugging_face_gpt2, lambda: torch.randint(50257, (rows, length)),
        lambda model, tokens: model(tokens, labels=tokens).loss,
    )  # fmt: skip


def _hugging_face_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # not a dependency of ours

    return GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False))


def workloads(*, large: bool = False) -> dict[str, Workload]:
    """By name. `large`: for a GPU, the GPT has more than 100 M parameters."""
    small_gpt = gpt("byte-level GPT, 2.8 M parameters, batch 4 x 64", 192, 6, 6, 4, 64)
    large_gpt = gpt("byte-level GPT, 114 M parameters, batch 4 x 256", 768, 12, 16, 4, 256)
    return {
        "linear": Workload(
            "8 x Linear(1024), batch 32",
            lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))),
            lambda: torch.randn(32, 1024),
            mean_square,
        ),
        "gpt": large_gpt if large else small_gpt,
        "small": Workload(
            "50 x Linear(16): 100 small parameters", lambda: Residual(50, 16), lambda: torch.randn(32, 16), mean_square
        ),
        "tiny": Workload(
            "1,000 x Linear(4): 2,000 tiny parameters", lambda: Residual(1000, 4), lambda: torch.randn(32, 4), mean_square
        ),
    }
