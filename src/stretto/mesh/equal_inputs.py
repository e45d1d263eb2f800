"""Have all members of a group been given the same? With different tensors each would compute a part of another result."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from stretto.collectives import calls
from stretto.collectives.group import Group
from stretto.tensors_in import tensors_in


def first_that_differs(group: Group, values: Any) -> int | None:
    """The rank in the job of the first member that has other tensors in `values` than the group's first one; the same answer at
    all, which call it together."""
    if group.size == 1:
        return None
    digests = calls.gather_object(group, _digest(values))
    return next((rank for rank, digest in zip(group.ranks, digests, strict=True) if digest != digests[0]), None)


def _digest(values: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(values):
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{tuple(plain.shape)} {plain.dtype}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()
