"""Parameters that several stages have: an embedding whose weights are the output layer's too.

In one process they are one tensor, and autograd adds up what its uses give. Here each stage that uses it holds a copy. The
copies begin equal; after every backward, once the replicas of each stage have combined theirs, the stages add up their
gradients, all with the same bits; so optimizers that treat them alike keep them equal. (The optimizer must treat them alike:
the same options for the copy on every stage. That is checked by the tests, not here.)

Cost: for each set of stages, one all-reduce of what they share, after the last backward. Reference: Megatron-LM does this for its
word embeddings; torch's `pipelining` has a copy on each stage and never adds them up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stretto.collectives import calls
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.errors import ConfigurationError
from stretto.partition.layers import Layer

Stages = tuple[int, ...]
LABEL = " of parameters that several stages have"


def tied(layers_of_stages: Sequence[Sequence[Layer]]) -> dict[Stages, list[nn.Parameter]]:
    """For each set of stages, the parameters that all of them have, and no others."""
    homes: dict[nn.Parameter, set[int]] = defaultdict(set)
    for stage, layers in enumerate(layers_of_stages):
        for layer in layers:
            for parameter in layer.module.parameters():
                homes[parameter].add(stage)
    found: dict[Stages, list[nn.Parameter]] = defaultdict(list)
    for parameter, stages in homes.items():
        if len(stages) > 1:
            found[tuple(sorted(stages))].append(parameter)
    return dict(sorted(found.items()))


def check_buffers(layers_of_stages: Sequence[Sequence[Layer]]) -> None:
    """Refuse state other than parameters in several stages: each would change a copy of its own. Constants are not saved, and may
    be in as many as they like."""
    homes: dict[int, tuple[int, str]] = {}
    for stage, layers in enumerate(layers_of_stages):
        for layer in layers:
            for inner, module in layer.module.named_modules():
                for name, buffer in module._buffers.items():
                    if buffer is None or name in module._non_persistent_buffers_set:
                        continue
                    here = ".".join(filter(None, (layer.name, inner, name)))
                    home, there = homes.setdefault(id(buffer), (stage, here))
                    if home != stage:
                        raise ConfigurationError(
                            f"the buffer {there} of stage {home} of a pipeline is {here} of stage {stage} too: each stage would "
                            f"change a copy of its own (the running statistics of a BatchNorm, say), unlike one process.\n"
                            f"Use a module of its own in each, cut elsewhere, or, if nothing ever changes it, register it with "
                            f"persistent=False."
                        )


class Tie:
    """What this worker shares with other stages of its replica. Made by all of them together, `begin` too."""

    def __init__(self, group: Group, parameters: Sequence[nn.Parameter]) -> None:
        self.group = group
        self.parameters = list(parameters)
        self._before: list[Tensor | None] = []

    @property
    def counts_here(self) -> bool:
        """Whether this stage is the one that speaks for them where a parameter must count once."""
        return self.group.rank == 0

    def make_equal(self) -> None:
        """All take the values of the first stage."""
        with torch.no_grad():
            for parameter in self.parameters:
                calls.start_broadcast(self.group, parameter.data, 0).wait()

    def put_aside(self) -> None:
        """A backward begins: what earlier ones have left in `p.grad` is added up already."""
        self._before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def add_up(self) -> None:
        """The backward has ended on this stage: its gradients become the sum over all of them."""
        trained = [each for each in zip(self.parameters, self._before, strict=True) if each[0].requires_grad]
        ours = [torch.zeros_like(each) if each.grad is None else each.grad for each, _ in trained]
        started = [self.group.begin(Kind.ALL_REDUCE, each, "ring", lambda: None, op="sum", label=LABEL) for each in ours]
        for (parameter, before), gradient, handle in zip(trained, ours, started, strict=True):
            handle.wait()
            parameter.grad = gradient if before is None else before + gradient
        self._before = []

    def forget(self) -> None:
        self._before = []
