"""Layouts: which modules of a model are cut, and over which dimensions of a mesh. Plain values, checked before anything is done.

The rules are those of Mesh-TensorFlow. A dimension of a tensor is cut over at most one dimension of the mesh; no tensor has two
dimensions cut over the same one; what is cut divides. Over dimensions of the mesh that a tensor is not cut over, it is
replicated. Every layout that keeps them gives the same results.

Activations are tensors too. The batch is cut over `batch`, so whatever else is cut over that dimension would be cut twice in an
activation: a worker would have the i-th features of the i-th samples. That is refused.

Reference: Shazeer et al., "Mesh-TensorFlow: deep learning for supercomputers", NeurIPS 2018, arXiv:1811.02084. Departs from it:
rules name modules, not dimensions of tensors, because torch's dimensions have no names; what is cut within a block is decided by
the placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor, nn

from stretto.errors import ConfigurationError
from stretto.mesh.names import matches
from stretto.mesh.placements import FeedForward, Heads, LinearMap, Placement, Planned, Split, Vocabulary

PIPELINE = "pipeline"  # along it workers have different modules, and train by themselves
PLACEMENTS = (Heads, FeedForward, LinearMap, Vocabulary)
Pattern = str | type[nn.Module]
Rule = tuple[Pattern, Placement]


@dataclass(frozen=True, init=False, slots=True)
class ModelLayout:
    """What of a model is cut: rules of a pattern and a placement, and the dimension of the mesh over which the batch is.

        Layout(("**.self_attn", Heads("model")), ("layers.*", FeedForward("model")), ("head", LinearMap(out="model")))

    A pattern is the name of modules as `named_modules` gives it, with * for what differs within a part
    of it and ** for any number of parts, or a class. Every rule must match something, unless `optional`: for layouts that know
    several kinds of models. Then what is of no known kind stays whole too.
    """

    rules: tuple[Rule, ...]
    batch: str | None
    optional: bool

    def __init__(self, *rules: Rule, batch: str | None = "data", optional: bool = False) -> None:
        for rule in rules:
            _check_rule(rule)
        if not rules:
            raise ConfigurationError(
                'Layout() without a rule cuts nothing. Write Layout(("**.mlp", FeedForward("model")), ...), or train the whole '
                "model with stretto.distribute."
            )
        object.__setattr__(self, "rules", tuple(rules))
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "optional", optional)
        for pattern, placement in rules:
            if batch is not None and batch in placement.over:
                raise ConfigurationError(
                    f"Layout: the batch is cut over {batch!r}, and ({_text(pattern)}, {placement!r}) cuts features over it too: "
                    f"the activation between them would have two dimensions cut over one of the mesh.\n"
                    "Name another dimension of the mesh in one of them (Layout(..., batch=None): every worker gets the "
                    "whole batch)."
                )

    def __repr__(self) -> str:
        rules = ", ".join(f"({_text(pattern)}, {placement!r})" for pattern, placement in self.rules)
        batch = "" if self.batch == "data" else f", batch={self.batch!r}"
        return f"Layout({rules}{batch}{', optional=True' if self.optional else ''})"

    @property
    def over(self) -> tuple[str, ...]:
        """The dimensions of the mesh that tensors are cut over, in the order in which rules name them."""
        return tuple(dict.fromkeys(name for _, placement in self.rules for name in placement.over))

    def batch_over(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The dimension of a mesh over which the batch is cut, if there is one."""
        return (self.batch,) if self.batch is not None and self.batch in sizes else ()

    def plan(self, model: nn.Module, sizes: Mapping[str, int]) -> list[Planned]:
        """What is to be done with a model on a mesh of these sizes. Raises `ConfigurationError` before anything is done."""
        self._check_names(sizes)
        planned = []
        for module, (name, placement) in self._matches(model).items():
            try:
                planned.append(placement.plan(module, name, dict(sizes)))
            except ConfigurationError:
                if not self.optional:
                    raise
        if not planned:
            raise ConfigurationError(
                f"{self!r} cuts nothing of this {type(model).__name__}: none of its modules is of a kind that the layout knows.\n"
                f'Write a layout for it: Layout(("name.of.the.mlp", FeedForward("model", up="...", down="...")), ...).'
            )
        check_splits(model, [split for each in planned for split in each.splits], sizes)
        return planned

    def _check_names(self, sizes: Mapping[str, int]) -> None:
        for name in self.over:
            if name not in sizes:
                mesh = ", ".join(f"{each}={size}" for each, size in sizes.items())
                raise ConfigurationError(
                    f"{self!r} cuts over {name!r}, and the mesh is Mesh({mesh}).\n"
                    f"Write Mesh(..., {name}=...), or name one of {', '.join(map(repr, sizes))} in the layout."
                )
        left = [name for name, size in sizes.items() if size > 1 and name not in (*self.over, PIPELINE)]
        if self.batch is not None and self.batch not in sizes and left:
            raise ConfigurationError(
                f"{self!r}: the batch is over {self.batch!r}, of which this mesh has no such dimension, and along {left[0]!r} "
                f"workers would train apart.\n"
                f"Write batch={left[0]!r} in the layout, or name that dimension of the mesh {self.batch!r}. "
                "(batch=None: every worker "
                f"gets the whole batch.)"
            )

    def _matches(self, model: nn.Module) -> dict[nn.Module, tuple[str, Placement]]:
        """Every module that is to be cut: its name, and how."""
        found: dict[nn.Module, tuple[str, Placement]] = {}
        modules = list(model.named_modules())
        for pattern, placement in self.rules:
            matched = [(name, module) for name, module in modules if _matches(pattern, name, module)]
            if not matched and not self.optional:
                names = [name for name, _ in modules if name]
                close = get_close_matches(pattern, names, 3, 0.4) if isinstance(pattern, str) else []
                nearest = f" The nearest names: {', '.join(map(repr, close))}." if close else ""
                raise ConfigurationError(
                    f"Layout: ({_text(pattern)}, {placement!r}) matches no module of this {type(model).__name__}.{nearest}\n"
                    "Write a name as model.named_modules() gives it, with * for a part of it that differs and ** for "
                    "any number of parts, or a class."
                )
            for name, module in matched:
                if module in found and found[module][1] != placement:
                    raise ConfigurationError(
                        f"Layout: {name or 'the model'!r} would be cut twice, by {found[module][1]!r} and by {placement!r}.\n"
                        f"Make the patterns narrower, so that one rule is left for it."
                    )
                found[module] = (name, placement)
        return found


def _check_rule(rule: object) -> None:
    if not isinstance(rule, tuple) or len(rule) != 2:
        raise ConfigurationError(
            f'Layout({rule!r}): a rule is a pattern and a placement. Write Layout(("**.mlp", FeedForward("model")), ...).'
        )
    pattern, placement = rule
    if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
        raise ConfigurationError(f"Layout(({pattern!r}, ...)): a pattern is the name of modules, or a class of modules.")
    if isinstance(placement, type) or not isinstance(placement, Placement):
        names = ", ".join(f"{kind.__name__}(...)" for kind in PLACEMENTS)
        raise ConfigurationError(f"Layout(({_text(pattern)}, {placement!r})): no placement. Write one of {names}.")


def _text(pattern: object) -> str:
    return pattern.__name__ if isinstance(pattern, type) else repr(pattern)


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    return isinstance(module, pattern) if isinstance(pattern, type) else matches(pattern, name)


Layout = ModelLayout  # what users write; within the package codecs have a class of that name


# -- the rules ----------------------------------------------------------------------------------------------------------


def check_splits(model: nn.Module, splits: list[Split], sizes: Mapping[str, int]) -> dict[Tensor, tuple[Split, ...]]:
    """Every parameter that is cut: how, once for each of its dimensions that is. Where modules share one, all must agree."""
    names = {id(module): name for name, module in model.named_modules()}
    by_place: dict[tuple[int, str], list[Split]] = {}
    for split in splits:
        _check_divides(split, _name(names, split), sizes[split.over])
        by_place.setdefault((id(split.module), split.name), []).append(split)
    out: dict[Tensor, tuple[Split, ...]] = {}
    for place in by_place.values():
        first = place[0]
        name, parameter = _name(names, first), getattr(first.module, first.name)
        _check_once(name, place)
        if parameter in out and _kind(out[parameter]) != _kind(tuple(place)):
            raise ConfigurationError(
                f"Layout: {name} is shared with {_name(names, out[parameter][0])}, and cut otherwise there.\n"
                f"Cut both alike, or untie them."
            )
        out[parameter] = tuple(place)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in out and (id(module), name) not in by_place:
                other = _name(names, out[parameter][0])
                raise ConfigurationError(
                    f"Layout: {other} is to be cut, and {module_name}.{name} is the same tensor, of a module that the "
                    "layout does "
                    f"not name and that would compute with a slice.\n"
                    f"Name both: an embedding that is tied to the map to logits is cut by Vocabulary(...) for each of them."
                )
    return out


def _name(names: Mapping[int, str], split: Split) -> str:
    prefix = names.get(id(split.module), "")
    return f"{prefix}.{split.name}" if prefix else split.name


def _kind(splits: tuple[Split, ...]) -> list[tuple[int, str, tuple[int, ...]]]:
    return sorted((split.dim, split.over, split.parts) for split in splits)


def _check_divides(split: Split, name: str, size: int) -> None:
    for part in split.parts:
        units = part // split.unit
        if part % split.unit or units % size:
            fits = [number for number in range(1, units + 1) if units % number == 0]
            nearest = min(fits, key=lambda number: (abs(number - size), -number))
            each = f" of {split.unit} features each" if split.unit > 1 else ""
            raise ConfigurationError(
                f"Layout: {name} has {units} {split.what}{each}, which are not {size} equal shares: dimension "
                f"{split.dim} cannot be "
                f"cut over {split.over}={size}.\n"
                f"Write Mesh(..., {split.over}={nearest}), leave the module out of the layout, or make the model with a "
                "number of "
                f"{split.what} that {size} divides ({units // size * size + size}, say)."
            )


def _check_once(name: str, place: list[Split]) -> None:
    for number, split in enumerate(place):
        for other in place[:number]:
            if split.dim == other.dim:
                raise ConfigurationError(
                    f"Layout: dimension {split.dim} of {name} would be cut twice, over {other.over!r} and over {split.over!r}. "
                    f"A dimension is cut over at most one of the mesh. Leave one of the two rules out."
                )
            if split.over == other.over:
                raise ConfigurationError(
                    f"Layout: dimensions {other.dim} and {split.dim} of {name} would both be cut over {split.over!r}: "
                    "most of the "
                    f"tensor would be nowhere. Name another dimension of the mesh in one of the rules, or leave it out."
                )
