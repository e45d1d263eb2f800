"""Which parameters are gathered together: units, from the tree of modules.

    model                                 units
      embedding      Embedding            root            embedding, norm
      blocks         ModuleList           blocks.0
        0            Block                blocks.1        (neighbours travel together up to `merged_bytes`)
        1            Block
      norm           LayerNorm

A unit is an element of an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`: these are called one after the other, as whole
modules. A large element of which nearly all is in such containers inside it is divided by these. Smaller neighbours are one
unit, up to `merged_bytes`. All the rest is the root unit, which is gathered for as long as the model's forward runs: what is a
plain attribute of a module may be read by any method of it (`functional.linear(x, self.embedding.weight)`, the output projection
of `nn.MultiheadAttention`), without a call that could be seen. So is a parameter that modules of several units share.

Invariant: a function of the tree of modules and of the parameters' sizes alone, so the same on all workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

LEAST_SHARE = 0.9  # of an element that is divided lies in its containers
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class UnitPlan(NamedTuple):
    """The parameters of one unit, by name, and the modules whose forwards read them."""

    name: str
    modules: list[nn.Module]
    parameters: list[tuple[str, Tensor]]


def find_units(model: nn.Module, merged_bytes: int, divided_bytes: int = 0) -> list[UnitPlan]:
    """The root first, then the others in the order of the tree. `divided_bytes`: elements that are larger may be divided."""
    blocks = _without_repetitions(_elements("", model, max(merged_bytes, divided_bytes)))
    users: dict[Tensor, set[int]] = {}
    for number, (_, block) in enumerate(blocks):
        for parameter in block.parameters():
            users.setdefault(parameter, set()).add(number)
    inside = {module for _, block in blocks for module in block.modules()}
    outside = {p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    at_home = {p: min(numbers) for p, numbers in users.items() if len(numbers) == 1 and p not in outside}
    root: list[tuple[str, Tensor]] = []
    of_block: list[list[tuple[str, Tensor]]] = [[] for _ in blocks]
    for named in model.named_parameters():
        of_block[at_home[named[1]]].append(named) if named[1] in at_home else root.append(named)
    in_root = {parameter for _, parameter in root}
    owners = [m for m in model.modules() if m is not model and any(p in in_root for p in m.parameters(recurse=False))]
    units = [UnitPlan("the root", [model, *owners], root)]
    for (name, block), parameters in zip(blocks, of_block, strict=True):
        if not parameters:
            continue
        last = units[-1]
        if len(units) > 1 and _num_bytes(last.parameters) + _num_bytes(parameters) <= merged_bytes:
            first = last.name.partition(" ... ")[0]
            units[-1] = UnitPlan(f"{first} ... {name}", [*last.modules, block], [*last.parameters, *parameters])
        else:
            units.append(UnitPlan(name, [block], parameters))
    return units


def _elements(name: str, module: nn.Module, divided_bytes: int) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        inside = list(_elements(full, child, divided_bytes))
        is_element = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS)
        if not is_element or _is_better_divided(child, inside, divided_bytes):
            yield from inside
        elif next(child.parameters(), None) is not None:
            yield full, child


def _is_better_divided(element: nn.Module, inside: list[tuple[str, nn.Module]], divided_bytes: int) -> bool:
    """Whether it is large, and little of it would be left to the root."""
    num_bytes = _bytes_of(element)
    return num_bytes > divided_bytes and sum(_bytes_of(block) for _, block in inside) >= LEAST_SHARE * num_bytes


def _without_repetitions(blocks: Iterator[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """A module that is in two places, or inside another block, once."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    for name, block in blocks:
        if block not in seen:
            found.append((name, block))
            seen |= set(block.modules())
    return found


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _num_bytes(named: list[tuple[str, Tensor]]) -> int:
    return sum(parameter.nbytes for _, parameter in named)
