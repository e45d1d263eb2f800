"""Writes the table of docs/gossip.md that says how far apart CHOCO lets workers go, for codecs and values of `pull`.

    PYTHONPATH=src python docs/tabulate_pull.py

Four workers on a ring move at random, each element by a normal number of variance 1 in each step, and mix. There is no network:
messages of a step are handed over when all have sent theirs, so the table is the same in every run. A test computes it again.
"""

from __future__ import annotations

from pathlib import Path

import torch

from stretto.aggregate.gossip import Ring
from stretto.aggregate.gossip.compressed import CompressedAverage
from stretto.aggregate.gossip.exchange import Arrived
from stretto.aggregate.gossip.mixing import Weights
from stretto.compress.codec import Codec
from stretto.compress.layout import Layout
from stretto.compress.qsgd import QSGD
from stretto.compress.sign import Sign
from stretto.compress.top_k import TopK

PAGE = Path(__file__).resolve().parent / "gossip.md"
BEGIN, END = "<!-- table: written by tabulate_pull.py -->", "<!-- end of this table -->"
CODECS: dict[str, Codec] = {"TopK(0.05)": TopK(0.05), "TopK(0.01)": TopK(0.01), "Sign()": Sign(), "QSGD(4)": QSGD(4)}
PULLS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
SIZE, NUMEL, STEPS, LAST = 4, 2000, 400, 100
GROWS = 1000.0  # where workers are so far apart, they go on parting


def distance(codec: Codec, pull: float) -> float:
    """From the mean of all, in the root of the mean square over elements, workers and the last steps."""
    random = torch.Generator().manual_seed(0)
    weights: Weights = Ring().weights(SIZE)
    blocks = codec.blocks(Layout.of([("weight", (NUMEL,))]))
    models = torch.zeros(SIZE, NUMEL)
    workers = [CompressedAverage(rank, lambda step: weights, pull, codec, blocks, models[rank]) for rank in range(SIZE)]
    found: list[float] = []
    for step in range(1, STEPS + 1):
        arrived: list[list[Arrived]] = [[] for _ in range(SIZE)]
        for rank, worker in enumerate(workers):
            for to, payload, note in worker.leaves(step, models[rank].clone(), frozenset()):
                arrived[to].append(Arrived(step, rank, note, torch.frombuffer(bytearray(payload), dtype=torch.uint8)))
        models += torch.randn(SIZE, NUMEL, generator=random)
        for rank, worker in enumerate(workers):
            if (moved := worker.difference(step, arrived[rank])) is not None:
                models[rank] += moved
        found.append(float((models - models.mean(0)).square().mean()))
        if not found[-1] < GROWS**2:
            return float("inf")
    return (sum(found[-LAST:]) / LAST) ** 0.5


def cell(codec: Codec, pull: float) -> str:
    found = distance(codec, pull)
    return f"{found:.2g}" if found < 100 else f"{found:.0f}" if found < GROWS else "grows"


def table() -> str:
    lines = [f"| pull | {' | '.join(f'{pull:g}' for pull in PULLS)} |", "|---" * (1 + len(PULLS)) + "|"]
    for name, codec in CODECS.items():
        lines.append(f"| `{name}` | {' | '.join(cell(codec, pull) for pull in PULLS)} |")
    return "\n".join(lines)


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
