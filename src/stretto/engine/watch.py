"""Noticing that a model's parameters are not what they were, at every forward, without walking its tree of modules.

A walk costs about a microsecond per parameter and module, more than the rest of a round for models of many small parameters. The
tables that the tree is made of are kept instead: as long as they hold the same objects, a walk would find the same. The objects
are kept too, until the next look: the address of one that is gone may be given to the one that replaces it.

A parameter that was frozen gets no gradient any more, which the end of a round sees anyway: flags of parameters that wanted a
gradient are only read when that has been seen (`closely`).
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# `_cdata`: torch.utils.swap_tensors puts another tensor into the same Python object, without the hooks of the first.
_KINDS = ("dtype", "device", "_cdata", *(["grad_dtype"] if hasattr(Tensor, "grad_dtype") else []))
KIND = attrgetter(*_KINDS)
_EACH_KIND = [attrgetter(name) for name in _KINDS]  # one after the other: a thousand tuples would set off the garbage collector
_VALUES = methodcaller("values")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Watch:
    """A model's parameters and buffers as they were when this was made."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        children = [module._modules for module in modules if module._modules]
        self._own = [module._parameters for module in modules if module._parameters]
        self._empty = [table for module in modules for table in (module._modules, module._parameters) if not table]
        self._buffers = [module._buffers for module in modules]
        self._norms = [module for module in modules if isinstance(module, _NormBase)]
        self._tables: list[Any] = [*children, *self._own]
        self._members_before = self.members()
        firsts = (next(iter(table.values()), None) for table in self._own)
        self._firsts = [p for p in firsts if p is not None]
        images = [p for table in self._own for p in table.values() if p is not None and p.dim() >= 4]
        self._laid_out = images + [p for p in self._firsts if 2 <= p.dim() < 4]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._before, self._closely_before = self._look(), self._look_closely()

    def changed(self, *, closely: bool) -> bool:
        if closely and self._look_closely() != self._closely_before:
            return True
        return self._other_members() or self._look() != self._before

    def buffers(self) -> list[Tensor]:
        """As `model.buffers()`, of the modules that were there; one that is in two modules comes once."""
        if not any(self._buffers):
            return []
        found = {id(buffer): buffer for table in self._buffers for buffer in table.values() if buffer is not None}
        return list(found.values())

    def statistics(self) -> set[int]:
        """The ids of those buffers that backward does not read, although autograd saves them: of normalisation in training."""
        return {id(norm._buffers.get(name)) for norm in self._norms if norm.training for name in STATISTICS}

    def replace_buffer(self, old: Tensor, new: Tensor) -> None:
        """Wherever the model has `old`."""
        for table in self._buffers:
            for name, buffer in table.items():
                if buffer is old:
                    table[name] = new

    def members(self) -> list[nn.Module | Tensor | None]:
        """Every child and parameter that the tables hold now."""
        return list(chain.from_iterable(map(_VALUES, self._tables)))

    def _other_members(self) -> bool:
        before = self._members_before
        now = chain.from_iterable(map(_VALUES, self._tables))
        return sum(map(len, self._tables)) != len(before) or not all(map(is_, now, before))

    def _look(self) -> tuple[Any, ...]:
        """While the members are the same."""
        return (
            [list(map(get, self._firsts)) for get in _EACH_KIND],  # what converts a module converts all of it
            list(map(Tensor.stride, self._laid_out)),  # what makes a module channels-last changes images alone
            any(self._empty),
            any(p.requires_grad for p in self._frozen),
        )

    def _look_closely(self) -> list[Any]:
        parameters = [p for table in self._own for p in table.values() if p is not None]
        return [(p.requires_grad, p.stride(), *KIND(p)) for p in parameters]
