"""What torch asks a process group's "backend" for one device. Here that backend is the group again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stretto.torch_backend.process_group import StrettoGroup


class BackendView:
    """The answers for any device."""

    supports_coalescing = False  # of calls one by one; the coalesced calls are there
    supports_splitting = True
    supports_time_estimate = False

    def __init__(self, group: StrettoGroup) -> None:
        self._group = group

    @property
    def options(self) -> object:
        return self._group.options

    def rank(self) -> int:
        return self._group.group.rank

    def size(self) -> int:
        return self._group.group.size

    def name(self) -> str:
        return self._group.name()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """All members are connected when the group is made. `dist.split_group` asks which device the group was bound to."""
        self._group.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Called on ranks that are not in a new group: they take no part in making it."""

    def _set_sequence_number_for_group(self) -> None:
        self._group._set_sequence_number_for_group()
