"""What a compression remembers from round to round, and how it is kept right when a round comes to nothing.

Two sections: `own` differs from worker to worker (a residual), `shared` is the same on all (PowerSGD's Q). Each holds flat
vectors as long as the bucket ("residual"), of which every parameter has its part, and tensors of any shape by name ("q").

A round *proposes* new values and does not touch what is there; `commit` makes them the state when the round has ended well on all
workers, `discard` forgets them (a gradient was not finite somewhere, or a backward failed: then nobody steps, and what earlier
rounds left must not be lost). Cost: a second buffer for each flat vector.

CompressionState is handed in and out by parameter name, so it survives other buckets; see `export` and `restore`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.compress.layout import Layout, TensorPlace

SERVER = "server_residual"  # what a worker keeps of the means that it combines for all: also when it has no data of its own
Exported = dict[str, dict[str, Tensor]]  # parameter -> kind -> value


class Section:
    """Values by kind, and those proposed to follow them."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._flat: dict[str, Tensor] = {}
        self._starts: dict[str, int] = {}
        self._spare: dict[str, Tensor] = {}
        self._proposed_flat: dict[str, Tensor] = {}
        self._by_name: dict[tuple[str, str], Tensor] = {}
        self._proposed_by_name: dict[tuple[str, str], Tensor] = {}

    def flat(self, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The vector of that kind, float32, zeros at first. Not to be written to. `start`, `stop`: if a part of it is kept."""
        if kind not in self._flat:
            length = self._layout.num_elements if stop is None else stop - start
            self._flat[kind] = torch.zeros(length, device=self._device, dtype=torch.float32)
            self._starts[kind] = start
        vector = self._flat[kind]
        assert stop is None or (self._starts[kind], len(vector)) == (start, stop - start), "another part than the one kept here"
        return vector

    def next_flat(self, kind: str) -> Tensor:
        """Memory for the vector that follows `flat(kind)`; its content is undefined until written."""
        if kind not in self._proposed_flat:
            spare = self._spare.pop(kind, None)
            self._proposed_flat[kind] = torch.empty_like(self.flat(kind)) if spare is None else spare
        return self._proposed_flat[kind]

    def get(self, kind: str, name: str) -> Tensor | None:
        """The value of that kind that belongs to parameter `name`, if any was set. Not to be written to."""
        return self._by_name.get((kind, name))

    def set_next(self, kind: str, name: str, value: Tensor) -> None:
        """Propose a value to follow `get(kind, name)`."""
        self._proposed_by_name[kind, name] = value

    def commit(self) -> None:
        for kind, vector in self._proposed_flat.items():
            self._spare[kind] = self._flat[kind]
            self._flat[kind] = vector
        self._by_name.update(self._proposed_by_name)
        self._proposed_flat, self._proposed_by_name = {}, {}

    def keep_as_it_was(self, places: Sequence[TensorPlace]) -> None:
        """Take back what was proposed for these parameters: nobody has used their gradients."""
        for kind, proposed in self._proposed_flat.items():
            for place in places:
                start = self._starts[kind]
                first, last = max(0, place.start - start), min(len(proposed), place.stop - start)
                if first < last:
                    proposed[first:last] = self._flat[kind][first:last]
        names = {place.name for place in places}
        self._proposed_by_name = {key: value for key, value in self._proposed_by_name.items() if key[1] not in names}

    def discard(self) -> None:
        self._spare.update(self._proposed_flat)
        self._proposed_flat, self._proposed_by_name = {}, {}

    def export(self) -> Exported:
        """A copy of everything, by parameter name; where only a part of a vector is kept here, zeros for the rest."""
        out: Exported = {}
        for place in self._layout.places:
            mine = {kind: place.as_tensor(self._cut_out(kind, place)).contiguous() for kind in self._flat}
            mine |= {kind: value.clone() for (kind, name), value in self._by_name.items() if name == place.name}
            if mine:
                out[place.name] = mine
        return out

    def _cut_out(self, kind: str, place: TensorPlace) -> Tensor:
        vector, start = self._flat[kind], self._starts[kind]
        out = torch.zeros(place.size, device=self._device, dtype=torch.float32)
        first, last = max(place.start, start), min(place.stop, start + len(vector))
        if first < last:
            out[first - place.start : last - place.start] = vector[first - start : last - start]
        return out

    def restore(self, exported: Mapping[str, Mapping[str, Tensor]], flat_kinds: frozenset[str]) -> None:
        """Take what `export` gave for the parameters that are here; what it has nothing for begins anew.

        Where only a part of a vector is kept here, it takes that part: call `flat` before, which names it.
        """
        for place in self._layout.places:
            for kind, value in exported.get(place.name, {}).items():
                if kind in flat_kinds:
                    self._put_in(kind, place, place.as_vector(value))
                else:
                    self._by_name[kind, place.name] = value.to(self._device, copy=True)

    def _put_in(self, kind: str, place: TensorPlace, value: Tensor) -> None:
        vector, start = self.flat(kind), self._starts[kind]
        first, last = max(place.start, start), min(place.stop, start + len(vector))
        if first < last:
            vector[first - start : last - start] = value[first - place.start : last - place.start]


class _OfAbsent(Section):
    """A worker without data: zeros for what is its own, but for what it keeps as one that combines blocks."""

    def __init__(self, present: Section) -> None:
        super().__init__(present._layout, present._device)
        self._present = present

    def flat(self, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self._present.flat(kind, start, stop) if kind == SERVER else super().flat(kind, start, stop)

    def next_flat(self, kind: str) -> Tensor:
        return self._present.next_flat(kind) if kind == SERVER else super().next_flat(kind)

    def keep_as_it_was(self, places: Sequence[TensorPlace]) -> None:
        super().keep_as_it_was(places)
        self._present.keep_as_it_was(places)

    def commit(self) -> None:
        super().commit()
        self._present.commit()

    def discard(self) -> None:
        super().discard()
        self._present.discard()


class CompressionState:
    """What the compression of one bucket remembers: both sections, and how many rounds it has seen."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.own = Section(layout, device)
        self.shared = Section(layout, device)
        self.rounds = 0

    def of_absent(self) -> CompressionState:
        """For a worker without data: it has nothing of its own to give, keeps what it has, and follows what is shared."""
        other = CompressionState(self.layout, self.device)
        other.own, other.shared, other.rounds = _OfAbsent(self.own), self.shared, self.rounds
        return other

    def keep_as_it_was(self, places: Sequence[TensorPlace]) -> None:
        self.own.keep_as_it_was(places)
        self.shared.keep_as_it_was(places)

    def commit(self) -> None:
        self.own.commit()
        self.shared.commit()
        self.rounds += 1

    def discard(self) -> None:
        self.own.discard()
        self.shared.discard()
