"""The user's optimizer, stepping pieces of parameters instead of whole ones.

    w_i(t+1), s_i(t+1) = U(w_i(t), s_i(t), g_i(t), t, options(t))        for each element i by itself

holds for torch's element-wise optimizers (`ELEMENTWISE`): a parameter that is cut anywhere is updated as the whole one would be,
with the same bits where torch computes a piece as it computes the whole. So a second optimizer of the same class steps the pieces
that this worker owns, with the options that the user's has at that moment. The user's own object keeps `param_groups`, schedulers
and hooks; it has no state of what is in slices, but for the length of a `state_dict` (`whole_state.py`).

LARS and LAMB take norms of whole parameters, which are those of all workers' pieces: one small all-reduce for each bucket.

Memory: the state of 1/P of the elements, in one arena for each vector. Pieces are views of the parameters, so they take none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.parameter_server.shard_optimizer import ELEMENTWISE
from stretto.aggregate.zero.bucket import SlicedBucket
from stretto.aggregate.zero.norms import on_host
from stretto.aggregate.zero.slices import Piece
from stretto.engine.arena import MemoryKind, laid_out
from stretto.engine.postponed_step import copy_option, with_gradients
from stretto.optim.lamb import LAMB
from stretto.optim.lars import LARS
from stretto.optim.layerwise import Layerwise, Steps, answer

Options = list[dict[str, Any]]  # of each group, without its parameters
OF_A_SCALER = ("grad_scale", "found_inf")  # that a GradScaler leaves in a fused optimizer for the length of a step


LAYERWISE: Mapping[type[Layerwise], tuple[str, ...]] = {LARS: ("momentum_buffer",), LAMB: ("exp_avg", "exp_avg_sq")}


def vectors_of(optimizer: Optimizer) -> tuple[str, ...]:
    """The names of what it keeps for each element of a parameter; the rest of its state is one value per parameter."""
    for known, vectors in LAYERWISE.items():
        if type(optimizer) is known:
            return vectors
    return ELEMENTWISE[type(optimizer).__name__].all_vectors


class SliceOptimizer:
    """One of the optimizers that were given to `distribute`."""

    def __init__(self, optimizer: Optimizer, add_up: Callable[[Tensor], None]) -> None:
        """`add_up`: over all workers, in place."""
        self.user, self._add_up = optimizer, add_up
        self.vectors = vectors_of(optimizer)
        self.buckets: list[SlicedBucket] = []  # that have a parameter of its
        self.group_of: dict[Tensor, int] = {}
        self._stepping: Optimizer | None = None  # None: this worker owns nothing of its
        self._pieces: dict[SlicedBucket, list[Piece]] = {}
        self._homes: dict[Any, dict[Piece, Tensor]] = {}  # a vector of state -> where it is to lie for each piece: in an arena
        self._settled: set[SlicedBucket] = set()  # of which all state lies there

    def arrange(self, buckets: Sequence[SlicedBucket]) -> None:
        """These buckets are cut into slices. What it remembers of pieces that it still has stays."""
        self.group_of = _groups_of(self.user)
        self.buckets = [bucket for bucket in buckets if any(parameter in self.group_of for parameter in bucket.parameters)]
        self._pieces = {bucket: [piece for piece in bucket.pieces if piece.parameter in self.group_of] for bucket in self.buckets}
        before = self._stepping
        self._stepping = self._made()
        self._homes.clear()
        self._settled.clear()
        if before is not None and self._stepping is not None:
            mine = {piece.weight for _, piece in self.pieces}
            self._stepping.state.update({weight: state for weight, state in before.state.items() if weight in mine})
        self.take_in()

    def move(self, buckets: Sequence[SlicedBucket], states: Iterable[Mapping[Tensor, dict[str, Any]]]) -> None:
        """These buckets are cut in another way than before: state goes to the workers that own it from now on. `states`: all that
        is in slices, a part of it at a time. Parameters that are not cut any more have their state in the user's optimizer."""
        groups = _groups_of(self.user)
        cut = {parameter for bucket in buckets for parameter in bucket.parameters if parameter in groups}
        mine = {piece.parameter: piece for bucket in buckets for piece in bucket.pieces if piece.parameter in groups}
        parts: dict[Tensor, dict[str, Any]] = {}
        for some in states:
            parts.update({p: self._cut(mine[p], state) for p, state in some.items() if p in mine})
            self.user.state.update({p: state for p, state in some.items() if p not in cut})
            del some  # before there is the next
        self.forget()
        self.arrange(buckets)
        self.take_in(parts, are_cut=True)

    def _cut(self, piece: Piece, state: Mapping[str, Any]) -> dict[str, Any]:
        return {name: piece.of(value).clone() if self._is_vector(name, value) else value for name, value in state.items()}

    @property
    def is_current(self) -> bool:
        """Whether the user's groups have the same parameters as before."""
        return _groups_of(self.user) == self.group_of

    @property
    def pieces(self) -> Iterator[tuple[SlicedBucket, Piece]]:
        return ((bucket, piece) for bucket, pieces in self._pieces.items() for piece in pieces)

    def _made(self) -> Optimizer | None:
        groups: dict[int, list[nn.Parameter]] = {}
        for _, piece in self.pieces:
            groups.setdefault(self.group_of[piece.parameter], []).append(piece.weight)
        if not groups:
            return None
        takes = inspect.signature(type(self.user).__init__).parameters
        options = self.options_now()
        named = [
            {**{key: value for key, value in options[number].items() if key in takes}, "params": weights}
            for number, weights in groups.items()
        ]
        made: Optimizer = type(self.user)(named, **{k: copy_option(v) for k, v in self.user.defaults.items() if k in takes})
        return made

    def options_now(self) -> Options:
        """A learning rate may be another one a line later."""
        return [{key: copy_option(value) for key, value in group.items() if key != "params"} for group in self.user.param_groups]

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, bucket: SlicedBucket, slots: Mapping[int, bool], options: Options) -> None:
        """Step what this worker owns of these parameters of a bucket. `slots`: which, and whether their gradient is zero. All
        workers call it."""
        groups: dict[int, list[nn.Parameter]] = {}
        gradients: dict[Tensor, Tensor] = {}
        for piece in self._pieces[bucket]:
            if piece.slot in slots:
                self._look_at(piece)
                groups.setdefault(self.group_of[piece.parameter], []).append(piece.weight)
                gradients[piece.weight] = _like(piece.weight, bucket.part_to_step(piece, zeroed=slots[piece.slot]))
        if isinstance(self.user, Layerwise):
            self._step_layers(bucket, slots, options)
        elif groups and self._stepping is not None:
            given = {name: getattr(self.user, name) for name in OF_A_SCALER if hasattr(self.user, name)}
            self._stepping.__dict__.update(given)
            try:
                named = [{**options[number], "params": weights} for number, weights in sorted(groups.items())]
                with_gradients(self._stepping, named, gradients)
            finally:
                for name in given:
                    del self._stepping.__dict__[name]
        if bucket not in self._settled:
            self._settle(bucket)

    def _settle(self, bucket: SlicedBucket) -> None:
        """Optimizers make their state in the first step: it moves to where it stays."""
        states = [(piece, self._stepping.state.get(piece.weight, {})) for piece in self._pieces[bucket]] if self._stepping else []
        with torch.inference_mode(False), torch.no_grad():
            for piece, state in states:
                for name in self.vectors:
                    value = state.get(name)
                    if isinstance(value, Tensor) and value.shape == piece.weight.shape:
                        state[name] = self._home(piece, name, value).copy_(value)
        if all(state for _, state in states):
            self._settled.add(bucket)

    def _home(self, piece: Piece, name: str, value: Tensor) -> Tensor:
        weight = piece.weight
        key = name, value.dtype, value.device, weight.dtype
        if key not in self._homes:
            alike = [each for _, each in self.pieces if each.weight.dtype is weight.dtype and each.weight.device == weight.device]
            pinned = value.device.type == "cpu" and weight.is_pinned()  # torch makes a state like the weight, but not pinned
            kind = MemoryKind(value.dtype, value.device, pinned=pinned)
            self._homes[key] = dict(zip(alike, laid_out((kind, len(each.weight)) for each in alike), strict=True))
        return self._homes[key][piece]

    def _step_layers(self, bucket: SlicedBucket, slots: Mapping[int, bool], options: Options) -> None:
        """By norms of whole parameters. All workers take part, whatever they own."""
        sums = torch.zeros(2 * len(bucket.parameters), dtype=torch.float64, device="cpu")
        asking: list[tuple[int, Steps, Tensor]] = []
        places: list[int] = []
        mine: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            for piece in self._pieces[bucket]:
                if piece.slot in slots:
                    assert isinstance(self._stepping, Layerwise)
                    self._look_at(piece)
                    part = _like(piece.weight, bucket.part_to_step(piece, zeroed=slots[piece.slot]))
                    group, state = options[self.group_of[piece.parameter]], self._stepping.state[piece.weight]
                    gradient = part.to(torch.promote_types(part.dtype, torch.float32))
                    steps = self._stepping.steps(piece.weight, gradient, state, group, piece.parameter)
                    if (asked := next(steps, None)) is not None:
                        asking.append((piece.slot, steps, asked[0]))
                        places += [2 * piece.slot, 2 * piece.slot + 1]
                        mine += [torch.linalg.vector_norm(each, dtype=torch.float64) for each in asked]
            sums[places] = on_host(mine).square()
            self._add_up(sums)
            norms = sums.sqrt()
            for slot, steps, like in asking:
                one, other = (norms[2 * slot + place].to(like.device, like.dtype) for place in (0, 1))
                answer(steps, one, other)

    def weight_of(self, piece: Piece) -> Tensor:
        """The values of a piece after a step."""
        if piece.parameter in self.group_of and (not piece.is_apart or piece.parameter._version == piece.seen):
            return piece.weight.detach()
        return piece.in_parameter

    def _look_at(self, piece: Piece) -> None:
        """The parameter may have other memory by now (`p.data = ...`)."""
        if piece.is_apart:
            if piece.parameter._version != piece.seen:  # the program has written to it
                piece.weight.data.copy_(piece.in_parameter)
                piece.seen = piece.parameter._version
            return
        part = piece.in_parameter
        if part.data_ptr() != piece.weight.data_ptr():
            piece.weight.data = part

    def has(self, parameter: Tensor) -> bool:
        """Whether this parameter is in slices, and stepped by this optimizer."""
        return parameter in self.group_of and any(parameter is each for bucket in self.buckets for each in bucket.parameters)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_of(self, piece: Piece) -> Mapping[str, Any]:
        return {} if self._stepping is None else self._stepping.state.get(piece.weight, {})

    def take_in(
        self, given: Mapping[Tensor, Mapping[str, Any]] | None = None, *, cast: bool = False, are_cut: bool = False
    ) -> None:
        """Keep this worker's slices of what the user's optimizer has of these parameters (or of what is given), which it then has
        no longer. `cast`: to the dtype of the weights, as `load_state_dict` does. `are_cut`: what is given is slices."""
        state = self.user.state if given is None else given
        found = {piece: dict(state[piece.parameter]) for _, piece in self.pieces if piece.parameter in state}
        self._settled.clear()
        for piece, whole in found.items():
            assert self._stepping is not None
            self._stepping.state[piece.weight] = {
                name: self._part(piece, name, value, cast=cast, is_cut=are_cut) for name, value in whole.items()
            }
        self.drop_whole()

    def _is_vector(self, name: str, value: Any) -> TypeGuard[Tensor]:
        return name in self.vectors and isinstance(value, Tensor)

    def _part(self, piece: Piece, name: str, value: Any, *, cast: bool, is_cut: bool) -> Any:
        if self._is_vector(name, value):
            part = value if is_cut else piece.of(value.detach())
            is_rounded = cast and value.is_floating_point() and piece.weight.is_floating_point()
            return part.to(piece.weight.device, piece.weight.dtype if is_rounded else part.dtype, copy=not is_cut)
        return self._counted(name, copy_option(value), piece.parameter, piece.weight.device)

    def _counted(self, name: str, value: Any, parameter: Tensor, device: torch.device) -> Any:
        """What there is once for a parameter. A fused or capturable step reads its count where the parameter is, as torch's
        `load_state_dict` has it."""
        options = self.user.param_groups[self.group_of[parameter]]
        if name == "step" and isinstance(value, Tensor) and (options.get("fused") or options.get("capturable")):
            return value.to(device, torch.float32)
        return value

    def beside_parameters(self, states: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """Whole states, from host memory, where torch's own step expects them."""
        return {
            parameter: {
                name: value.to(parameter.device)
                if self._is_vector(name, value)
                else self._counted(name, value, parameter, parameter.device)
                for name, value in state.items()
            }
            for parameter, state in states.items()
        }

    def show_whole(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """The user's optimizer has all of its state, in the order of its parameters."""
        everything = {**self.user.state, **states}
        self.user.state.clear()
        self.user.state.update({p: everything.pop(p) for p in self.group_of if p in everything} | everything)

    def drop_whole(self) -> None:
        """The user's optimizer has no state of what is in slices."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter in self.group_of:
                    self.user.state.pop(parameter, None)

    def forget(self) -> None:
        """Begin anew."""
        if self._stepping is not None:
            self._stepping.state.clear()
        self._homes.clear()
        self._settled.clear()


def _like(weight: Tensor, part: Tensor) -> Tensor:
    """The gradient where and as what the weight is."""
    return part.to(weight.device, weight.dtype)


def _groups_of(optimizer: Optimizer) -> dict[Tensor, int]:
    return {parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}


def parts_by_saved_index(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[Tensor, Any]:
    """The state in a `state_dict`, by the parameters that it will belong to. Nothing where the groups do not match: torch says
    so."""
    groups = saved.get("param_groups", [])
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        return {}
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {p: saved["state"][number] for number, p in zip(numbers, parameters, strict=True) if number in saved["state"]}
