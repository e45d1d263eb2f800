"""A backward in two halves: first the gradients of what came in, for which the stage before waits; later those of the parameters.

A node of autograd's graph through which inputs are reached, and that also leads somewhere from which no input is reached, is a
*fork*: a matrix product leads to its input on one side and to its weight on the other. The first half runs backward to the
inputs, and keeps for every fork the gradient that came to it; autograd leaves out what leads to parameters alone. The second
half starts at each fork with what was kept and goes to its parameters alone. So everything is computed once, but for what a
fork computes for both its sides at once.

A parameter to which several forks lead (a layer called twice) gets its gradient in the first half: from the second it could not
be had without passing through one fork on the way from another.

Holds between the halves: what autograd has saved of the forward, and the gradients at the forks.
Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; torch's `distributed.pipelining` splits at the same nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]


class SplitBackward:
    """One micro-batch's backward through one part, in two halves: `inputs`, then `weights`."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self._outputs = list(outputs)
        self._inputs = list(inputs)
        self._forks = _Graph(outputs, inputs, parameters)
        self._kept: dict[Node, Gradients] = {}

    def inputs(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The first half: the gradients of the inputs, given those of the outputs."""
        handles = [fork.register_prehook(self._keeper(fork)) for fork in self._forks.private]
        wanted = [*self._inputs, *self._forks.shared]
        try:
            found = torch.autograd.grad(self._outputs, wanted, list(gradients), retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        self._outputs.clear()
        here = found[len(self._inputs) :]
        for parameter, gradient in zip(self._forks.shared, here, strict=True):
            if gradient is not None:
                torch.autograd.backward([parameter], [gradient])
        return list(found[: len(self._inputs)])

    def _keeper(self, fork: Node) -> Any:
        def keep(gradients: Gradients) -> None:
            self._kept[fork] = gradients

        return keep

    def weights(self) -> None:
        """The second half: gradients of parameters, added to what is there."""
        while self._kept:
            fork, gradients = self._kept.popitem()
            edges = [(GradientEdge(fork, number), each) for number, each in enumerate(gradients) if each is not None]
            if edges:
                starts, values = zip(*edges, strict=True)
                torch.autograd.backward(list(starts), list(values), inputs=self._forks.private[fork])


class _Graph:
    """`private`: fork -> the parameters that only it leads to. `shared`: those to which several do."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self._inputs = {get_gradient_edge(each).node for each in inputs}
        self._parameters = {get_gradient_edge(each).node: each for each in parameters}
        order = _from_leaves([get_gradient_edge(each).node for each in outputs])
        reaches = set(self._inputs)
        for node in order:
            if any(after in reaches for after in _next(node)):
                reaches.add(node)
        # By node from which no input is reached: the parameters that are.
        below: dict[Node, set[nn.Parameter]] = {}
        for node in order:
            if node not in reaches:
                mine = {self._parameters[node]} if node in self._parameters else set()
                below[node] = mine.union(*(below[after] for after in _next(node)))
        forks = {
            node: set().union(*(below[after] for after in _next(node) if after not in reaches))
            for node in order
            if node in reaches
        }
        times = Counter(parameter for found in forks.values() for parameter in found)
        alone = {node: [each for each in found if times[each] == 1] for node, found in forks.items()}
        self.private = {node: found for node, found in alone.items() if found}
        # An output may be made of parameters alone.
        self.shared = [each for each in parameters if times[each] != 1]


def _next(node: Node) -> list[Node]:
    return [after for after, _ in node.next_functions if after is not None]


def _from_leaves(roots: Sequence[Node]) -> list[Node]:
    """All nodes below the roots, each after those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((after, False) for after in _next(node) if after not in seen)
    return order
