"""A byte-level GPT on the text of Python's own standard library.

    python examples/gpt.py                                one worker
    stretto run -n 4 examples/gpt.py                      four workers
    torchrun --nproc-per-node 4 examples/gpt.py
    stretto run -n 4 examples/gpt.py --strategy "horovod()" --steps 300
    stretto run -n 4 examples/gpt.py --strategy "Strategy(compress=ErrorFeedback(Sign()))"              one bit per gradient value
    stretto lab --hosts 4 --rate 100mbit -- python examples/gpt.py --strategy "power_sgd(warm_up=20)"   on a slow network

However many workers there are, the losses are the same to within rounding (unless gradients are compressed): every worker draws
the whole batch from one seed and keeps its rows of it, and `stretto.weight` lets each row count the same, also where they cannot
be shared out equally.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import stretto

CONTEXT = 64
GLOBAL_BATCH = 32
NUM_REPORTS = 5
VALIDATION_SEED = 12345


class Text(NamedTuple):
    """Bytes, as int64."""

    train: Tensor
    validation: Tensor


def standard_library() -> Text:
    """The top-level modules in alphabetical order; every tenth is kept for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if len(files) < 10:
        raise SystemExit("examples/gpt.py reads the *.py files of Python's standard library, and this Python has none on disk.")
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for number, file in enumerate(files):
        parts[number % 10 == 9].extend(file.read_bytes())
    train, validation = (torch.frombuffer(part, dtype=torch.uint8).long() for part in parts)
    return Text(train, validation)


def my_rows(text: Tensor, generator: torch.Generator) -> Tensor:
    """This worker's rows of the next batch, (rows, CONTEXT + 1)."""
    starts = torch.randint(len(text) - CONTEXT, (GLOBAL_BATCH,), generator=generator)
    mine = starts[stretto.rank() :: stretto.world_size()]
    return text[mine[:, None] + torch.arange(CONTEXT + 1)].to(stretto.device())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.to_qkv(self.before_attention(x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.from_heads(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out: (n, length) -> (n, length, 256)."""

    def __init__(self, width: int = 96, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.byte(x) + self.position(places))))
        return logits


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def mean_over_rows(loss: Tensor, num_rows: int) -> float:
    """The mean over all rows of all workers, of a loss that is a mean over this worker's."""
    total = stretto.all_reduce(torch.tensor([float(loss) * num_rows, num_rows]), op="sum")
    return float(total[0] / total[1])


def validate(model: nn.Module, text: Tensor, batches: int = 4) -> float:
    generator = torch.Generator().manual_seed(VALIDATION_SEED)
    with torch.no_grad():
        rows = [my_rows(text, generator) for _ in range(batches)]
        return sum(mean_over_rows(loss_of(model, each), len(each)) for each in rows) / batches


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--strategy", default="Strategy()", metavar="TEXT", help="for instance 'horovod()' or 'Strategy(compress=Int8())'"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    stretto.init()
    if stretto.world_size() > GLOBAL_BATCH:
        raise SystemExit(f"{stretto.world_size()} workers for a batch of {GLOBAL_BATCH} rows: start at most {GLOBAL_BATCH}.")
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)  # the same on all workers
    text = standard_library()
    model = Gpt().to(stretto.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = stretto.distribute(model, optimizer, options.strategy)

    for step in range(1, options.steps + 1):
        rows = my_rows(text.train, generator)
        stretto.weight(len(rows))
        loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the combined gradient: the same on all workers
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.steps // NUM_REPORTS) == 0:
            train, validation = mean_over_rows(loss.detach(), len(rows)), validate(model, text.validation)
            if stretto.rank() == 0:
                print(f"step {step:4d}  train loss {train:.4f}  validation loss {validation:.4f}  (nats per byte)", flush=True)
    stretto.shutdown()


if __name__ == "__main__":
    main()
