"""A bucket whose gradients end as slices, and the memory that buckets borrow while they are under way.

    backward        gradients stay where autograd has put them until the bucket's last one has come
    fill            into one flat memory, and the tensors that autograd has made are free
    reduce-scatter  of that memory
    land            this worker's part of it is the mean; the rest is of no use

Stage 1: the flat memory is the bucket's own, and the slice lies in it. Stage 2: it is borrowed from `Room`, which has two pieces
for each kind of bucket, and the slice is copied out of it; who needs a third waits for the oldest of the buckets under way.

A parameter that has a bucket to itself, as every large one does, needs no such memory: its gradient is sent from where autograd
has put it, unless somebody else holds it. So what `Room` has does not grow with the model (C_B of ZeRO-R).

A gradient that was combined and not used (a second backward before the step) is kept aside when its bucket is filled again, and
added to the new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.aggregate.zero.gradient import GradientInSlices
from stretto.aggregate.zero.norms import SliceNorms
from stretto.aggregate.zero.slices import Apart, Piece, SliceBounds, pieces_of
from stretto.engine.arena import MemoryKind, laid_out
from stretto.engine.bucket import alias_of, is_only_here, refuse_graph, views_of

AT_ONCE = 2  # buckets under way that have memory


class Room:
    """Memory for buckets under way: `AT_ONCE` pieces for each dtype and device, as long as the longest bucket of that kind."""

    def __init__(self) -> None:
        self._longest: dict[MemoryKind, int] = {}
        self._free: dict[MemoryKind, list[Tensor]] = {}
        self._lent: dict[MemoryKind, int] = {}

    def expect(self, dtype: torch.dtype, device: torch.device, num_elements: int) -> None:
        """There is a bucket of several parameters that is so long."""
        kind = MemoryKind(dtype, device)
        if num_elements > self._longest.get(kind, 0):
            self._longest[kind] = num_elements
            self._free.pop(kind, None)

    def has(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it can lend without taking more than it should."""
        return self._lent.get(MemoryKind(dtype, device), 0) < AT_ONCE

    def take(self, dtype: torch.dtype, device: torch.device, num_elements: int) -> Tensor:
        """At least so many undefined values. Never waits: beyond `AT_ONCE`, and for more than was expected, it is memory that is
        not kept."""
        kind = MemoryKind(dtype, device)
        self._lent[kind] = self._lent.get(kind, 0) + 1
        longest = self._longest.get(kind, 0)
        if num_elements > longest:
            return laid_out([(kind, num_elements)])[0]
        free = self._free.setdefault(kind, [])
        return free.pop() if free else laid_out([(kind, longest)])[0]

    def count_in(self, dtype: torch.dtype, device: torch.device) -> None:
        """Somebody uses memory of its own, and counts."""
        kind = MemoryKind(dtype, device)
        self._lent[kind] = self._lent.get(kind, 0) + 1

    def lose(self, memory: Tensor) -> None:
        """It may still be read, or is not from here: it is free when nobody has it any more."""
        self._lent[MemoryKind(memory.dtype, memory.device)] -= 1

    def give(self, memory: Tensor) -> None:
        kind = MemoryKind(memory.dtype, memory.device)
        self._lent[kind] -= 1
        free = self._free.setdefault(kind, [])
        if len(free) < AT_ONCE and len(memory) == self._longest.get(kind):
            free.append(memory)


class SlicedBucket(ReducedBucket):
    """See the module's text."""

    def __init__(self, members: Sequence[tuple[str, Tensor]], *arguments: Any, **options: Any) -> None:
        super().__init__(members, *arguments, **options)
        self.large = [False] * len(members)  # a gradient is copied when all are there
        self.room: Room | None = None  # None: it has memory of its own
        self.is_under_way = False  # it was sent, and its round is closed, but it has not arrived
        self._own_memory: Tensor | None = None
        self._borrowed: Tensor | None = None
        self._is_filled = False
        self._slice: Tensor | None = None  # this worker's part of the combined gradients
        self._slice_memory: Tensor | None = None
        self._before: Tensor | None = None  # of the gradients that were there before this round
        self._had: list[bool] = [False] * len(members)
        self._given: list[Tensor | None] = []
        self.shown: list[bool] = []  # what the last round gave a gradient
        self._stand_ins = [self._stand_in(slot) for slot in range(len(members))]

    def _take_memory(self, dtype: torch.dtype, device: torch.device) -> None:
        self._nothing = self.flat = torch.empty(0, dtype=dtype, device=device)
        self.views, self.tail, self.on_wire = [], self.flat, self.flat

    def cut(self, shares: SliceBounds, norms: SliceNorms, room: Room | None, apart: Apart | None = None) -> None:
        """Which part is whose. `room`: borrow memory from there; `apart`: where the weights are that are stepped."""
        self.shares, self.norms, self.room = shares, norms, room
        self.pieces: list[Piece] = pieces_of(self.parameters, self.layout, shares, apart)
        self._by_slot = {piece.slot: piece for piece in self.pieces}
        if room is None:
            self._own_memory = torch.zeros(self.num_gradient_elements, dtype=self.flat.dtype, device=self.flat.device)

    @property
    def is_alone(self) -> bool:
        """Whether it is one parameter's."""
        return len(self.parameters) == 1

    @property
    def slice_length(self) -> int:
        return self.shares.stop - self.shares.start

    def keep_slice_in(self, memory: Tensor) -> None:
        """This worker's part of the gradients is to lie there."""
        self._slice_memory = memory

    def pieces_of_slot(self, slot: int) -> list[Piece]:
        return [self._by_slot[slot]] if slot in self._by_slot else []

    # -- gradients that come ------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """What a program holds on to is a stand-in, or was its own."""
        return False

    def put(self, slot: int) -> None:
        """A combined gradient that is whole, the same on all workers: each keeps its part."""
        parameter, stand_in = self.parameters[slot], self._stand_ins[slot]
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, GradientInSlices):
            return
        refuse_graph(gradient)
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        for piece in self.pieces_of_slot(slot):
            self._part(piece).copy_(piece.of(dense.detach()))
        stand_in.is_zeroed, stand_in.added = False, None
        parameter.grad = stand_in
        self.forget_norms()

    def collect(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        self.used = [gradient is not None for gradient in gradients]
        self._had = [isinstance(each, GradientInSlices) and each.has_values for each in gradients]
        self._given = [each.take_added() if isinstance(each, GradientInSlices) else each for each in gradients]
        for each in self._given:
            if each is not None and each.requires_grad:
                refuse_graph(each)

    @property
    def has_before(self) -> bool:
        """Whether there are combined gradients that no step has used, to which this round will add."""
        return any(self._had)

    def fill(self) -> None:
        """Take memory, and copy there what was collected. The gradients are free then."""
        if self._is_filled:
            return
        self._before = self._slice.clone() if self._slice is not None and any(self._had) else None
        self._slice = None
        self.let_go()  # also so that a gradient is nobody's but ours
        given, self._given = self._given, []
        own = self._own_vector(given) if self.room is not None and self.is_alone else None
        if own is not None:
            assert self.room is not None
            self.room.count_in(self.flat.dtype, self.flat.device)
            self.flat = own
        else:
            self.flat = self._memory()[: self.num_gradient_elements]
        self.views, self.on_wire = views_of(self.flat, self.parameters), alias_of(self.flat)
        self._is_filled = True
        if own is None:
            self._copy(given)

    def _memory(self) -> Tensor:
        if self.room is None:
            assert self._own_memory is not None
            return self._own_memory
        self._borrowed = self.room.take(self.flat.dtype, self.flat.device, self.num_gradient_elements)
        return self._borrowed

    def _own_vector(self, given: list[Tensor | None]) -> Tensor | None:
        """The only gradient as it lies in memory, if nobody else can see what becomes of it there."""
        if given[0] is None or not is_only_here(given):
            return None
        gradient, parameter = given[0], self.parameters[0]
        if gradient.layout is not torch.strided or gradient.dtype is not self.flat.dtype or gradient.numel() == 0:
            return None
        is_contiguous = self.layout.places[0].order is None
        if not (gradient.is_contiguous() if is_contiguous else gradient.stride() == parameter.stride()):
            return None
        return gradient.detach().as_strided((gradient.numel(),), (1,))

    def _copy(self, given: list[Tensor | None]) -> None:
        with torch.no_grad():
            absent = [view for view, gradient in zip(self.views, given, strict=True) if gradient is None]
            pairs = [(view, gradient) for view, gradient in zip(self.views, given, strict=True) if gradient is not None]
            if absent:
                torch._foreach_zero_(absent)
            if pairs:
                dense = [gradient.to_dense() if gradient.is_sparse else gradient for _, gradient in pairs]
                torch._foreach_copy_([view for view, _ in pairs], dense)

    # -- what a round leaves ------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> Tensor:
        """While it is under way all that this worker has given; then its part of what they were combined to."""
        if self._is_filled or self._slice is None:
            return self.flat
        return self._slice

    def land(self) -> None:
        if not self._is_filled:
            return
        part = self.flat[self.shares.start : self.shares.stop]
        if self.room is None:
            self._slice = part
        else:
            self._slice = self._memory_of_slice().copy_(part)
        self._release()

    def _memory_of_slice(self) -> Tensor:
        assert self._slice_memory is not None, "whoever cuts buckets says where"
        return self._slice_memory

    def _release(self) -> None:
        before, self.flat = self.flat, self._nothing
        self.views, self.on_wire = [], self.flat
        if self.room is not None and self._is_filled:
            self.room.lose(before) if self._borrowed is None else self.room.give(self._borrowed)
        self._borrowed, self._is_filled = None, False

    def hand_out(self, used: Sequence[bool]) -> None:
        """The round is closed: this is what gradients are now."""
        self.complete()
        self.show(used)

    def complete(self) -> None:
        """It has landed: with what was there before, these are the gradients of the round."""
        if self._before is not None:
            for piece in self.pieces:
                if self._had[piece.slot]:
                    self._part(piece).add_(self._before[piece.start : piece.stop])
        self._before, self._had = None, [False] * len(self.parameters)
        self.is_under_way = False

    def show(self, used: Sequence[bool]) -> None:
        """Every parameter that anybody has used has a gradient, of which each worker has a part."""
        self.shown = list(used)
        for parameter, stand_in, somewhere in zip(self.parameters, self._stand_ins, used, strict=True):
            stand_in.is_zeroed, stand_in.added = False, None
            parameter.grad = stand_in if somewhere else None
        self.forget_norms()

    def drop(self) -> None:
        """The round has come to nothing."""
        self._release()
        self._slice = self._before = None
        self._given, self.shown, self.is_under_way = [], [], False
        self.let_go()
        self.forget_norms()

    # -- slices -------------------------------------------------------------------------------------------------------

    def _part(self, piece: Piece) -> Tensor:
        if self._slice is None:
            if self.room is None:
                assert self._own_memory is not None
                self._slice = self._own_memory[self.shares.start : self.shares.stop]
            else:
                self._slice = self._memory_of_slice()
        return self._slice[piece.start : piece.stop]

    def valid_part(self, piece: Piece) -> Tensor | None:
        """This worker's part of a gradient that is in slices; None if the parameter has none, or it is zero."""
        gradient = piece.parameter.grad
        if not isinstance(gradient, GradientInSlices) or gradient.is_zeroed or gradient.bucket is not self:
            return None
        return self._part(piece)

    def to_step(self) -> dict[int, bool]:
        """The slots of parameters that have a gradient now, and whether it counts as zeros."""
        gradients = [(slot, parameter.grad) for slot, parameter in enumerate(self.parameters)]
        return {
            slot: isinstance(gradient, GradientInSlices) and gradient.is_zeroed
            for slot, gradient in gradients
            if gradient is not None
        }

    def part_to_step(self, piece: Piece, *, zeroed: bool) -> Tensor:
        """The gradient of a piece, as an optimizer is to see it."""
        part = self._part(piece)
        return part.zero_() if zeroed else part

    def scale(self, slot: int, factor: Any, *, divide: bool) -> None:
        for piece in self.pieces_of_slot(slot):
            part = self.valid_part(piece)
            if part is not None:
                value = factor.to(part.device) if isinstance(factor, Tensor) else factor
                part.div_(value) if divide else part.mul_(value)
        self.forget_norms()

    def add(self, slot: int, gradient: Tensor) -> None:
        self.land()
        for piece in self.pieces_of_slot(slot):
            self._part(piece).add_(piece.of(gradient))

    def written(self, slots: Iterable[int]) -> None:
        """These parameters hold what was stepped."""
        for slot in slots:
            for piece in self.pieces_of_slot(slot):
                piece.seen = piece.parameter._version

    def forget_norms(self) -> None:
        self.norms.forget()

    def _stand_in(self, slot: int) -> GradientInSlices:
        made = GradientInSlices(self.parameters[slot], self.flat.dtype)
        made.place = weakref.ref(self), slot
        return made
