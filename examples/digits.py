"""Handwritten digits: a small convolutional network on the 8 x 8 images that come with scikit-learn.

    python examples/digits.py                             one worker
    stretto run -n 4 examples/digits.py                   four workers, the same training: batches stay 128
    torchrun --nproc-per-node 4 examples/digits.py        under another launcher
    stretto run -n 4 examples/digits.py --strategy "Strategy(schedule=WaitFree())"

`stretto.Sampler` gives each worker its share of every epoch; the accuracy is counted on shares of the test set and summed.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import stretto

GLOBAL_BATCH = 128
NUM_TEST = 360
NUM_REPORTS = 5


def digits() -> tuple[Tensor, Tensor]:
    """1797 images (n, 1, 8, 8) with values 0 to 1, and their labels, in an order that is always the same."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "examples/digits.py takes its images from scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(bunch.target)[order]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Each worker looks at its share; the counts are added up."""
    mine = slice(stretto.rank(), None, stretto.world_size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return float(stretto.all_reduce(right, op="sum")) / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--strategy", default="Strategy()", metavar="TEXT", help="for instance 'horovod()'")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    stretto.init()
    torch.manual_seed(options.seed)
    device = stretto.device()
    images, labels = (tensor.to(device) for tensor in digits())
    train = TensorDataset(images[NUM_TEST:], labels[NUM_TEST:])
    sampler = stretto.Sampler(train, seed=options.seed, drop_last=True)  # equal shares, so all workers make equally many steps
    batch = max(1, GLOBAL_BATCH // stretto.world_size())
    loader = DataLoader(train, batch_size=batch, sampler=sampler, drop_last=True)

    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = stretto.distribute(model, optimizer, options.strategy)

    step = 0
    while step < options.steps:
        for x, y in sampler.follow(loader):
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % max(1, options.steps // NUM_REPORTS) == 0:
                mean = stretto.all_reduce(loss.detach())
                if stretto.rank() == 0:
                    print(f"step {step:4d}  loss {float(mean):.4f}", flush=True)
            if step == options.steps:
                break
    correct = accuracy(model, images[:NUM_TEST], labels[:NUM_TEST])
    if stretto.rank() == 0:
        print(f"accuracy on {NUM_TEST} images not trained on: {correct:.1%}")
    stretto.shutdown()


if __name__ == "__main__":
    main()
