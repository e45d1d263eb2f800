"""Activations that are recomputed, and how their beginnings are stored meanwhile: ZeRO-R's P_a, P_a + cpu, and M_D.

A module that is checkpointed keeps its inputs alone, and runs once more in backward. Along a dimension that a model is cut over
all workers have the same inputs, so each keeps a slice of 1/N, and before the module runs again they put them together.

    kept             with `partition` 1/N of each floating-point input that takes part in autograd, else all of it
    sent             with `partition` (N-1)/N of it, once, in backward: b s h elements for a block of a Transformer, whose own
                     all-reduces send about twelve times as much
    offload="cpu"    what is kept lies in host memory (pinned, for a GPU), and nothing of it on the device. On a CPU it does
                     so anyway
    arena            slices that stay on the device lie side by side in one memory (`kept_arena.py`), as long as the most that is
                     kept at once: what outlives a forward is not scattered among what does not

Recomputation is torch's own (`torch.utils.checkpoint`, not re-entrant): it restores random generators, so the same is dropped
again. Only the inputs that it saves go through here.

Reference: Rajbhandari et al., "ZeRO", arXiv:1910.02054, sections 6.1 and 6.3. Departs from it: slices are of the flat tensor, and
equal up to the padding of the last.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from stretto.collectives import calls
from stretto.collectives.group import Group
from stretto.engine.arena import MemoryKind
from stretto.errors import ConfigurationError, RankMismatch
from stretto.mesh.cut_modules import become
from stretto.mesh.equal_inputs import first_that_differs
from stretto.mesh.kept_arena import KeptArena, KeptPiece
from stretto.mesh.names import matches

M = TypeVar("M", bound=nn.Module)


class _Kept(NamedTuple):
    """A copy of an input, or this worker's slice of one that all members of a group have."""

    piece: KeptPiece
    shape: torch.Size
    device: torch.device
    is_slice: bool


class Store:
    """How the inputs of checkpointed modules are kept."""

    def __init__(self, partition: Group | None, offload: bool) -> None:
        self.partition = partition if partition is not None and partition.size > 1 else None
        self.offload = offload
        self.arenas: dict[MemoryKind, KeptArena] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Store:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def compare(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Before a module's inputs are kept for the first time."""
        group = self.partition
        cut = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
        if group is not None and (other := first_that_differs(group, cut)) is not None:
            raise RankMismatch(
                f"{name!r} is checkpointed in slices, and ranks {group.ranks[0]} and {other} have called it with different "
                f"inputs in its first forward: backward would put together slices of different tensors.\n"
                f"Give all workers of partition= the same batches and weights, as tensor_parallel does; or leave partition out."
            )

    def pack(self, tensor: Tensor) -> Any:
        """Inputs without a gradient, masks say, may be many modules' at once: one whole is less than slices for each."""
        if not tensor.requires_grad:
            return tensor
        if self.partition is not None:
            flat = tensor.detach().reshape(-1)
            length = -(-flat.numel() // self.partition.size)
            return self._keep(flat[self.partition.rank * length :][:length], length, tensor, is_slice=True)
        if self.offload and tensor.device.type != "cpu":
            return self._keep(tensor.detach().reshape(-1), tensor.numel(), tensor, is_slice=False)
        return tensor

    def _keep(self, part: Tensor, length: int, whole: Tensor, *, is_slice: bool) -> _Kept:
        piece = self._memory(part, length)
        piece.values[: part.numel()].copy_(part)  # not asynchronously: the caller may write to the tensor next
        piece.values[part.numel() :].zero_()
        return _Kept(piece, whole.shape, whole.device, is_slice)

    def _memory(self, part: Tensor, length: int) -> KeptPiece:
        if self.offload and part.device.type != "cpu":  # torch knows until when a GPU reads what was pinned
            return KeptPiece(torch.empty(length, dtype=part.dtype, device="cpu", pin_memory=True))
        kind = MemoryKind(part.dtype, part.device)
        if kind not in self.arenas:
            self.arenas[kind] = KeptArena(kind)
        return self.arenas[kind].take(length)

    def unpack(self, kept: Any) -> Tensor:
        """Never memory of an arena, which others may have next: only slices lie there, and a gather copies them."""
        if not isinstance(kept, _Kept):
            assert isinstance(kept, Tensor)
            return kept
        values = kept.piece.values.to(kept.device, non_blocking=True)
        if kept.is_slice:
            assert self.partition is not None
            values = calls.start_all_gather(self.partition, values).wait().view(-1)[: kept.shape.numel()]
        return values.view(kept.shape)


class Checkpointed(nn.Module):
    """A mixin: in training the module is recomputed in backward."""

    _store: Store
    _checkpointed_as: str  # its name in the model
    _is_compared = False

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*arguments, **options)
        if not self._is_compared:
            self._is_compared = True
            self._store.compare(self._checkpointed_as, arguments)
        with saved_tensors_hooks(self._store.pack, self._store.unpack):
            return checkpoint(super().forward, *arguments, use_reentrant=False, **options)


def checkpoint_activations(model: M, *patterns: str, partition: Group | None = None, offload: Literal["cpu"] | None = None) -> M:
    """Recompute the modules whose names match in backward, instead of keeping what they compute. In place; returns the model.

        checkpoint_activations(model, "encoder.layers.*", partition=mesh.group("model"))

    `patterns` are names as `named_modules` gives them, with * and ** as in layouts; of those inside of one another the outermost
    counts. Of each only the inputs are kept. `partition`: a group whose members all have the same inputs, along which a model is
    cut: each keeps a slice, and they are gathered before the module runs again. The first forward of each module compares them.
    Sliced are tensors given by position that need a gradient; those given by name (`block(x, mask=mask)`) are kept whole.
    `offload="cpu"`: what is kept lies in host memory, also of a model on a GPU.
    """
    if offload not in (None, "cpu"):
        raise ConfigurationError(f'checkpoint_activations(offload={offload!r}): write "cpu", or leave it out.')
    if partition is not None and not isinstance(partition, Group):
        raise ConfigurationError(
            f'checkpoint_activations(partition={partition!r}): this is no group. Write mesh.group("model"), or leave it out.'
        )
    store = Store(partition, offload == "cpu")
    for name, module in _outermost(model, patterns):
        if isinstance(module, Checkpointed):
            raise ConfigurationError(f"checkpoint_activations: {name!r} is checkpointed already. Name it once.")
        become(module, Checkpointed)
        module._store, module._checkpointed_as = store, name  # type: ignore[assignment]
    return model


def _outermost(model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for pattern in patterns:
        matched = [(name, module) for name, module in model.named_modules() if name and matches(pattern, name)]
        if not matched:
            raise ConfigurationError(
                f"checkpoint_activations({pattern!r}): no module of this {type(model).__name__} has such a name. Write names as "
                f'model.named_modules() gives them, with * for what differs: "encoder.layers.*".'
            )
        found += matched
    if not found:
        raise ConfigurationError(
            'checkpoint_activations(model) without a name recomputes nothing. Name the blocks: "encoder.layers.*", say.'
        )
    names = {name for name, _ in found}
    inner = {name for name in names for other in names if name.startswith(f"{other}.")}
    return list({id(module): (name, module) for name, module in found if name not in inner}.values())
