"""Two models in one process: a GAN that learns a ring of eight Gaussians in the plane.

    python examples/gan.py                                one worker
    stretto run -n 4 examples/gan.py                      four workers
    torchrun --nproc-per-node 4 examples/gan.py
    stretto run -n 4 examples/gan.py --strategy "Strategy(schedule=AfterBackward())"

Both models are distributed, each with its own optimizer. The generator's backward runs through the critic as well; what that
leaves in the critic's gradients is thrown away, so it need not be sent: `stretto.no_sync(critic)`.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

import stretto

NUM_MODES = 8
RADIUS, SPREAD = 2.0, 0.1
LATENT = 8
GLOBAL_BATCH = 256
NUM_REPORTS = 5


def modes() -> Tensor:
    """The eight centres, (8, 2)."""
    angles = torch.arange(NUM_MODES) * (2 * math.pi / NUM_MODES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], 1)


def real_points(n: int) -> Tensor:
    return modes()[torch.randint(NUM_MODES, (n,))] + SPREAD * torch.randn(n, 2)


def perceptron(num_in: int, num_out: int, width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, num_out)
    )


def is_real(logits: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def is_fake(logits: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


def quality(generator: nn.Module, n: int = 1000) -> tuple[int, float]:
    """How many modes the workers' points reach between them, and the share of points near one."""
    with torch.no_grad():
        distances = torch.cdist(generator(torch.randn(n, LATENT, device=stretto.device())).cpu(), modes())
    nearest = distances.min(1)
    near = nearest.values < 5 * SPREAD
    counts = torch.bincount(nearest.indices[near], minlength=NUM_MODES)
    counts = stretto.all_reduce(counts, op="sum")
    total = n * stretto.world_size()
    return int((counts > total / NUM_MODES / 10).sum()), float(counts.sum()) / total


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN on a ring of Gaussians.")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--strategy", default="Strategy()", metavar="TEXT", help="for instance 'horovod()'")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    stretto.init()
    torch.manual_seed(options.seed * 1000 + stretto.rank())  # points of its own; distribute() makes the models equal
    device, batch = stretto.device(), max(1, GLOBAL_BATCH // stretto.world_size())
    generator, critic = perceptron(LATENT, 2).to(device), perceptron(2, 1).to(device)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, generator_optimizer = stretto.distribute(generator, generator_optimizer, options.strategy)
    critic, critic_optimizer = stretto.distribute(critic, critic_optimizer, options.strategy)

    for step in range(1, options.steps + 1):
        fake = generator(torch.randn(batch, LATENT, device=device))
        critic_optimizer.zero_grad()
        (is_real(critic(real_points(batch).to(device))) + is_fake(critic(fake.detach()))).backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        with stretto.no_sync(critic):
            is_real(critic(fake)).backward()
        generator_optimizer.step()

        if step % max(1, options.steps // NUM_REPORTS) == 0:
            reached, near = quality(generator)
            if stretto.rank() == 0:
                print(f"step {step:5d}  {reached} of {NUM_MODES} modes reached, {near:.0%} of the points near one", flush=True)
    stretto.shutdown()


if __name__ == "__main__":
    main()
