"""Which parameters of a model are in which fragment, where the model is exchanged a fragment at a time.

A *layer* is a module with parameters of its own: they are not split. Layers are dealt out in the order of the model, each to the
fragment that has the fewest elements so far (the first of them). For layers of one size that is every F-th layer, as in Streaming
DiLoCo; where sizes differ fragments are about equal all the same, and so are their exchanges.

Invariant: every parameter is in one fragment, and no fragment is empty. The same on all workers: names and sizes decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.engine.training import Named


def layers_of(named: Sequence[Named]) -> list[list[Named]]:
    """Parameters by the module that they belong to."""
    layers: dict[str, list[Named]] = {}
    for name, parameter in named:
        layers.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    return list(layers.values())


def fragments_of(named: Sequence[Named], count: int) -> list[list[Named]]:
    """So many fragments, each in the order of the model. There must be as many layers."""
    fragments: list[list[Named]] = [[] for _ in range(count)]
    sizes = [0] * count
    layers = layers_of(named)
    for number, layer in enumerate(layers):
        empty = sizes.count(0)
        # The last layers go to fragments that would have none, whatever their sizes.
        choice = range(count) if len(layers) - number > empty else [at for at in range(count) if not fragments[at]]
        chosen = min(choice, key=lambda at: sizes[at])
        fragments[chosen] += layer
        sizes[chosen] += max(1, sum(parameter.numel() for _, parameter in layer))
    return fragments
