"""Aggregate by writing into the same memory: all workers of one host step one copy of the weights, without locks (Hogwild)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """One copy of the weights for all workers of a host, which each of them reads and steps as if it were its own, and nobody
    waits for anybody. With `sync=Asynchronous()`.

        worker k, for ever:    g_k <- gradient of its batch at the w that it finds        w_v <- w_v - eta (g_k)_v    for v in g_k

    Made for sparse gradients (`nn.Embedding(..., sparse=True)` with `torch.optim.SGD`): a step writes the rows of its batch and
    no others, so that workers seldom meet. Where all workers write everything, updates of one overwrite those of another.

    Shared are the parameters. Gradients, the optimizer's state (momentum, Adam's means) and buffers are each worker's own. Rates
    are those of single gradients: P workers take P steps where one takes one.

    Cost: no byte is sent. Memory: one model for all workers together, beside each one's gradients and optimizer state.

    Reference: Niu, Recht, Re and Wright, "Hogwild!: a lock-free approach to parallelizing stochastic gradient descent", NIPS
    2011.
    Departs from it: workers are processes, and a batch is as large as the loop has it. A backward may read weights that are newer
    than those of its forward, where the paper's workers read each weight once.
    """
