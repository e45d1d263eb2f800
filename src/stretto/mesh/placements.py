"""How modules are cut: the right-hand sides of a layout's rules.

    Heads("model")         attention: whole heads for each worker. One all-reduce in forward, one in backward.
    FeedForward("model")   two linear maps (three where there is a gate) with something element-wise in between: the inner
                           features are cut. One all-reduce in forward, one in backward.
    LinearMap(out=..., into=...) one linear map, by its outputs, its inputs, or both over two dimensions of the mesh
    Vocabulary("model")    an embedding, or the linear map to logits: by words

What goes into a module that is cut, and what comes out of it, is whole: any choice of modules gives the same results.

A placement says which parameters it would cut, and where (`Split`), before anything is done; `layout.py` checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from stretto.errors import ConfigurationError
from stretto.mesh.cut_attention import CutAttention
from stretto.mesh.cut_modules import (
    CutBlock,
    CutEmbedding,
    CutLinear,
    CutModule,
    DownProjection,
    UpProjection,
    become,
)
from stretto.mesh.mesh import Axis
from stretto.mesh.region import Region

Axes = dict[str, Axis]  # by name


class Split(NamedTuple):
    """A dimension of one parameter that is to be cut."""

    module: nn.Module
    name: str  # of the parameter in it
    dim: int
    over: str  # a dimension of the mesh
    parts: tuple[int, ...]  # how long each part of the dimension is; all are cut alike
    unit: int = 1  # what must not be cut: the features of a head
    what: str = "rows"  # the units in words


class Planned(NamedTuple):
    """What a placement is going to do with one module."""

    splits: list[Split]
    finish: Callable[[Axes], None]  # when the parameters hold their slices


@runtime_checkable
class Placement(Protocol):
    """The right-hand side of a rule of a layout: one of `Heads`, `FeedForward`, `LinearMap` and `Vocabulary`."""

    @property
    def over(self) -> tuple[str, ...]:
        """The dimensions of the mesh that it names."""
        ...

    def plan(self, module: nn.Module, name: str, sizes: dict[str, int]) -> Planned:
        """What becomes of a module; `ConfigurationError` if it is of no kind that can be cut so."""
        ...


class Linear(NamedTuple):
    """A linear map, and which dimension of its weight counts what."""

    module: Any
    out: int
    into: int

    @property
    def out_features(self) -> int:
        return int(self.module.weight.shape[self.out])

    def by_out(self, over: str, parts: Sequence[int] | None = None, unit: int = 1, what: str = "outputs") -> Iterator[Split]:
        lengths = (self.out_features,) if parts is None else tuple(parts)
        yield Split(self.module, "weight", self.out, over, lengths, unit, what)
        if self.module.bias is not None:
            yield Split(self.module, "bias", 0, over, lengths, unit, what)

    def by_into(self, over: str, unit: int = 1, what: str = "inputs") -> Iterator[Split]:
        yield Split(self.module, "weight", self.into, over, (int(self.module.weight.shape[self.into]),), unit, what)


def as_linear(module: nn.Module | None) -> Linear | None:
    """nn.Linear, and the Conv1D of GPT-2. A class that computes something else with a linear map's weight is none."""
    if isinstance(module, nn.Linear):
        return Linear(module, 0, 1) if type(module).forward is nn.Linear.forward else None
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None:
        return Linear(module, 1, 0)
    return None


def _linear(module: nn.Module, name: str, child: str, asked: str) -> Linear:
    found = as_linear(getattr(module, child, None))
    if found is None:
        raise ConfigurationError(
            f"{asked} for {name or 'the model'}, a {type(module).__name__}: its {child!r} is "
            f"{_a(getattr(module, child, None))}, and only nn.Linear and GPT-2's Conv1D can be cut.\n"
            f"Name other children, or leave this module out of the layout."
        )
    return found


def _a(module: object) -> str:
    return "not there" if module is None else f"a {type(module).__name__}"


def _count_locally(linear: Linear, size: int, *, out: bool) -> None:
    """The attributes that say how large a linear map is."""
    ours, theirs = ("out_features", "nf") if out else ("in_features", "nx")
    for name in (ours, theirs):
        if name in linear.module.__dict__:
            setattr(linear.module, name, getattr(linear.module, name) // size)


def _pair(block: nn.Module, up: Sequence[Linear], down: Linear, over: str) -> Callable[[Axes], None]:
    """What makes a cut block of a module, once the slices are there."""

    def finish(axes: Axes) -> None:
        axis = axes[over]
        region = Region(axis, block)
        for linear in up:
            become(linear.module, UpProjection)
            linear.module._region = region
            _count_locally(linear, axis.size, out=True)
        become(down.module, DownProjection)
        down.module._region = region
        _count_locally(down, axis.size, out=False)
        become(block, CutBlock)
        block._region = region  # type: ignore[assignment]

    return finish


# -- attention ----------------------------------------------------------------------------------------------------------

SEPARATE = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("query", "key", "value"), ("out", "dense", "proj")),
    (("wq", "wk", "wv"), ("wo",)),
)
FUSED = (("c_attn", "c_proj"), ("qkv", "proj"), ("qkv_proj", "o_proj"), ("in_proj", "out_proj"))
COUNTS = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "n_kv_heads", "split_size", "all_head_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heads:
    """Cut attention by its heads, whole ones for each worker along a dimension of the mesh.

    For nn.MultiheadAttention; for GPT-2's attention, with q, k and v fused in `c_attn`; and for modules with one linear map for
    each of q, k and v (Llama's names and others), where several query heads may share one of k and v.

    `fused` and `out` name the children of other modules with one map to q, k and v, equally long and in this order.
    """

    dimension: str = "model"
    fused: str | None = None
    out: str | None = None

    @property
    def over(self) -> tuple[str, ...]:
        return (self.dimension,)

    def plan(self, module: nn.Module, name: str, sizes: dict[str, int]) -> Planned:
        if isinstance(module, nn.MultiheadAttention):
            return self._plan_torch(module, name)
        children = dict(module.named_children())
        for fused, out in ((self.fused, self.out),) if self.fused and self.out else FUSED:
            if fused in children and out in children:
                return self._plan_fused(module, name, str(fused), str(out))
        for projections, outs in SEPARATE:
            found = next((each for each in outs if each in children), None)
            if found is not None and all(each in children for each in projections):
                return self._plan_separate(module, name, projections, found)
        raise ConfigurationError(
            f"{self!r} for {name or 'the model'}, a {type(module).__name__} with the children {list(children)}: no "
            "attention that "
            f'is known.\nName the map to q, k and v and that of the output, Heads(..., fused="qkv", out="proj"), or leave it out.'
        )

    def _plan_torch(self, module: nn.MultiheadAttention, name: str) -> Planned:
        if type(module).forward is not nn.MultiheadAttention.forward:
            raise ConfigurationError(
                f"{self!r} for {name}, a {type(module).__name__}: it has a forward of its own, which does not know of heads that "
                f"are elsewhere. Leave it out of the layout."
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise ConfigurationError(
                f"{self!r} for {name}: nn.MultiheadAttention with add_bias_kv or add_zero_attn is not cut. Make it without them, "
                f"or leave it out of the layout."
            )
        unit, whole, over = module.head_dim, module.embed_dim, self.dimension
        splits = []
        if module.in_proj_weight is not None:
            splits.append(Split(module, "in_proj_weight", 0, over, (whole,) * 3, unit, "heads"))
        else:
            for part in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                splits.append(Split(module, part, 0, over, (whole,), unit, "heads"))
        if module.in_proj_bias is not None:
            splits.append(Split(module, "in_proj_bias", 0, over, (whole,) * 3, unit, "heads"))
        splits.append(Split(module.out_proj, "weight", 1, over, (whole,), unit, "heads"))

        def finish(axes: Axes) -> None:
            axis = axes[over]
            become(module, CutAttention)
            become(module.out_proj, CutModule)
            module._region = Region(axis, module)  # type: ignore[assignment]
            module.num_heads //= axis.size
            module.out_proj.in_features //= axis.size

        return Planned(splits, finish)

    def _plan_fused(self, module: nn.Module, name: str, fused: str, out: str) -> Planned:
        up, down = _linear(module, name, fused, repr(self)), _linear(module, name, out, repr(self))
        if getattr(module, "is_cross_attention", False):
            raise ConfigurationError(
                f"{self!r} for {name}: cross-attention with fused k and v is not cut. Leave it out of the layout."
            )
        heads = _number_of(module, name, ("num_heads", "num_attention_heads", "n_head", "n_heads"), repr(self))
        if up.out_features % (3 * heads):
            raise ConfigurationError(
                f"{self!r} for {name}: {fused!r} has {up.out_features} outputs, which are not q, k and v of {heads} heads each. "
                f"Where there are fewer heads of k and v than of q, write one map for each of the three."
            )
        unit = up.out_features // (3 * heads)
        parts = (heads * unit,) * 3
        splits = [*up.by_out(self.dimension, parts, unit, "heads"), *down.by_into(self.dimension, unit, "heads")]
        return Planned(splits, self._finished(module, [up], down))

    def _plan_separate(self, module: nn.Module, name: str, projections: Sequence[str], out: str) -> Planned:
        up = [_linear(module, name, each, repr(self)) for each in projections]
        down = _linear(module, name, out, repr(self))
        unit = getattr(module, "head_dim", None)
        if not isinstance(unit, int):
            counts = ("num_heads", "num_attention_heads", "n_head", "n_heads")
            unit = up[0].out_features // _number_of(module, name, counts, repr(self))
        splits = [
            *(split for linear in up for split in linear.by_out(self.dimension, None, unit, "heads")),
            *down.by_into(self.dimension, unit, "heads"),
        ]
        return Planned(splits, self._finished(module, up, down))

    def _finished(self, module: nn.Module, up: Sequence[Linear], down: Linear) -> Callable[[Axes], None]:
        make_block = _pair(module, up, down, self.dimension)

        def finish(axes: Axes) -> None:
            make_block(axes)
            for count in COUNTS:
                if isinstance(value := module.__dict__.get(count), int):
                    setattr(module, count, value // axes[self.dimension].size)

        return finish


def _number_of(module: nn.Module, name: str, attributes: Sequence[str], asked: str) -> int:
    for attribute in attributes:
        if isinstance(value := getattr(module, attribute, None), int) and value > 0:
            return value
    raise ConfigurationError(
        f"{asked} for {name}, a {type(module).__name__}: it does not say how many heads it has ({', '.join(attributes)}), and a "
        f"head must not be cut. Give it that attribute."
    )


# -- feed-forward blocks ------------------------------------------------------------------------------------------------

PAIRS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("linear1",), "linear2"),
    (("c_fc",), "c_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("w1", "w3"), "w2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Cut a feed-forward block between its linear maps: inner features, as many for each worker along a dimension of the mesh.

    `up` and `down` name the maps in the module; several for `up` are combined element by element, as a gate is. Between them
    there is nothing but what acts on each element by itself (activation, dropout). Left out, they are found by the names that
    torch's transformer layers, GPT-2, Llama and others have. `parts=2`: `up` is gate and up in one.
    """

    dimension: str = "model"
    up: str | tuple[str, ...] | None = None
    down: str | None = None
    parts: int = 1

    @property
    def over(self) -> tuple[str, ...]:
        return (self.dimension,)

    def plan(self, module: nn.Module, name: str, sizes: dict[str, int]) -> Planned:
        ups, down_name = self._names(module, name)
        up = [_linear(module, name, each, repr(self)) for each in ups]
        down = _linear(module, name, down_name, repr(self))
        splits: list[Split] = []
        for linear in up:
            if self.parts < 1 or linear.out_features % self.parts:
                raise ConfigurationError(
                    f"{self!r} for {name}: {linear.out_features} outputs are not {self.parts} equal parts. "
                    f"Write how many maps are one here: parts=1, or parts=2 for gate and up."
                )
            splits += linear.by_out(self.dimension, (linear.out_features // self.parts,) * self.parts, 1, "inner features")
        splits += down.by_into(self.dimension, 1, "inner features")
        return Planned(splits, _pair(module, up, down, self.dimension))

    def _names(self, module: nn.Module, name: str) -> tuple[tuple[str, ...], str]:
        if self.up is not None and self.down is not None:
            return (self.up,) if isinstance(self.up, str) else self.up, self.down
        children = dict(module.named_children())
        for ups, down in PAIRS:
            if down in children and all(up in children for up in ups):
                return ups, down
        raise ConfigurationError(
            f"{self!r} for {name or 'the model'}, a {type(module).__name__} with the children {list(children)}: no two "
            "linear maps "
            f'whose names are known.\nName them: FeedForward({self.dimension!r}, up="first", down="second").'
        )


# -- single maps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinearMap:
    """Cut one linear map by its outputs (`out`), its inputs (`into`), or both, over two different dimensions of the mesh.

    Outputs are gathered, inputs are sliced: before and after it everything is whole.
    """

    out: str | None = None
    into: str | None = None

    def __post_init__(self) -> None:
        if self.out is None and self.into is None:
            raise ConfigurationError(
                'LinearMap() cuts nothing. Name a dimension of the mesh: LinearMap(out="model") or LinearMap(into="model").'
            )
        if self.out == self.into:
            raise ConfigurationError(
                f"{self!r} cuts two dimensions of one tensor over the same dimension of the mesh: worker (i) would have the i-th "
                f"rows of the i-th columns, and the rest of the tensor nobody.\n"
                f'Write one of them, or name two dimensions of the mesh: LinearMap(out="rows", into="columns").'
            )

    @property
    def over(self) -> tuple[str, ...]:
        return tuple(each for each in (self.out, self.into) if each is not None)

    def plan(self, module: nn.Module, name: str, sizes: dict[str, int]) -> Planned:
        linear = as_linear(module)
        if linear is None:
            raise ConfigurationError(
                f"{self!r} for {name or 'the model'}, a {type(module).__name__}: only nn.Linear and GPT-2's Conv1D are cut so. "
                f"For attention there is Heads, for an embedding Vocabulary."
            )
        splits: list[Split] = []
        splits += linear.by_out(self.out) if self.out is not None else ()
        splits += linear.by_into(self.into) if self.into is not None else ()

        def finish(axes: Axes) -> None:
            become(module, CutLinear)
            mine: Any = module
            mine._out = None if self.out is None else axes[self.out]
            mine._into = None if self.into is None else axes[self.into]
            for over, out in ((self.out, True), (self.into, False)):
                if over is not None:
                    _count_locally(linear, axes[over].size, out=out)

        return Planned(splits, finish)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Cut an embedding, or the linear map to logits, by words. Where both share a weight, name both modules."""

    dimension: str = "model"

    @property
    def over(self) -> tuple[str, ...]:
        return (self.dimension,)

    def plan(self, module: nn.Module, name: str, sizes: dict[str, int]) -> Planned:
        if as_linear(module) is not None:
            return LinearMap(out=self.dimension).plan(module, name, sizes)
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            raise ConfigurationError(
                f"{self!r} for {name or 'the model'}, a {type(module).__name__}: only nn.Embedding, nn.Linear and GPT-2's Conv1D "
                f"have a dimension that counts words. Leave it out of the layout."
            )
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise ConfigurationError(
                f"{self!r} for {name}: an embedding with max_norm, sparse or scale_grad_by_freq is not cut. Make it without, or "
                f"leave it out of the layout."
            )
        splits = [Split(module, "weight", 0, self.dimension, (module.num_embeddings,), 1, "words")]

        def finish(axes: Axes) -> None:
            become(module, CutEmbedding)
            module._axis = axes[self.dimension]  # type: ignore[assignment]

        return Planned(splits, finish)
