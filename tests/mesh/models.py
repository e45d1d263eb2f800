"""Small models of the kinds that are cut, with the names of those that people use, and jobs of threads that train them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stretto
from largest import largest
from stretto.job import Job
from stretto.mesh.layout import Layout
from stretto.mesh.mesh import Mesh
from stretto.mesh.placements import FeedForward, Heads, LinearMap, Vocabulary
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts

_building = threading.Lock()  # torch's random state belongs to the process, and ranks are threads here
WORDS, LENGTH, WIDTH = 12, 5, 16


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: a linear map whose weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.size()[:-1], self.nf)


class GPT2Attention(nn.Module):
    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim, self.split_size = WIDTH, heads, WIDTH // heads, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (each.view(*each.shape[:-1], -1, self.head_dim).transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = self.attn_dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1))
        out = (weights @ v).transpose(1, 2)
        return self.resid_dropout(self.c_proj(out.reshape(*out.shape[:-2], -1)))  # type: ignore[no-any-return]


class GPT2MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))  # type: ignore[no-any-return]


class GPT2Block(nn.Module):
    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), GPT2Attention(heads, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), GPT2MLP(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """The shape and the names of GPT2LMHeadModel, with tied weights."""

    def __init__(self, heads: int = 4, dropout: float = 0.0, words: int = WORDS) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList([GPT2Block(heads, dropout) for _ in range(2)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, words, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.transformer["wte"](words) + self.transformer["wpe"](places)
        for block in cast(nn.ModuleList, self.transformer["h"]):
            x = block(x)
        out: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return out


class LlamaAttention(nn.Module):
    """One map for each of q, k and v, with two query heads for each head of k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = 2, 2
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down_proj = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()
        self.one, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.one(x))
        return x + self.mlp(self.other(x))  # type: ignore[no-any-return]


class OfWords(nn.Module):
    """Words to words, around whatever."""

    def __init__(self, body: nn.Module, *, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed_tokens, self.body = nn.Embedding(WORDS, WIDTH, padding_idx=0), body
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed_tokens(words)
        x = self.body(x) if self.batch_first else self.body(x.transpose(0, 1)).transpose(0, 1)
        return self.lm_head(x)  # type: ignore[no-any-return]


def encoder(*, norm_first: bool = False, batch_first: bool = True, dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout, batch_first=batch_first, norm_first=norm_first)
    return OfWords(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), batch_first=batch_first)


def llama() -> nn.Module:
    return OfWords(nn.Sequential(LlamaBlock(), LlamaBlock()))


def maps() -> nn.Module:
    """Linear maps by themselves."""
    return OfWords(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, WIDTH)))


ALL = stretto.recipes.megatron(vocabulary=True)
KINDS: dict[str, tuple[Callable[[], nn.Module], Layout]] = {
    "encoder": (encoder, ALL),
    "encoder, norm first": (lambda: encoder(norm_first=True, batch_first=False), stretto.recipes.megatron()),
    "gpt2": (GPT2, ALL),
    "llama": (llama, ALL),
    "maps": (
        maps,
        Layout(
            ("body.0", LinearMap(out="model")),
            ("body.2", LinearMap(into="model")),
            ("body.4", LinearMap(out="model")),
            ("embed_tokens", Vocabulary("model")),
        ),
    ),
    "feed-forward alone": (encoder, Layout((nn.TransformerEncoderLayer, FeedForward("model")))),
    "heads alone": (encoder, Layout(("**.self_attn", Heads("model")))),
}


def build(kind: str | Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    make = KINDS[kind][0] if isinstance(kind, str) else kind
    with _building, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(dtype)


def mesh_of(job: Job, **dimensions: int) -> Mesh:
    """A mesh whose groups do not measure their links first."""
    mesh = Mesh(**dimensions)
    for name in dimensions:
        mesh.group(name).choices = Choices([0], ["ring"], LinkCosts(1e-4, 1e-9, 1e-9))
    return mesh


def words(step: int, batch: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (batch, LENGTH), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return largest((one[name].double() - other[name].double()).abs().max().item() for name in one)
