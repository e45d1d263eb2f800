"""The values of one range on one server, and the update that runs there. Knows no protocol, and no clock.

    apply(g, options)        w, s <- U(w, s, g, options)        one of torch's own optimizers, on one flat parameter
    without an optimizer     w <- w + g                         increments: key-value use, or averages that are pulled together
                             w <- g                             if the options say `assign`

`lr_scale` multiplies the *rate*: with 1/tau for a stale gradient, say. To multiply the gradient would be the same for plain SGD
and nothing at all for Adam, which divides by the size of gradients.

Options are those of this step alone. What a push leaves out has the value that the optimizer was made with, not the one that the
push before it had, so updates do not depend on who pushed last.

Memory:    values, the optimizer's state, and each older version that somebody still holds. Nobody is handed a copy, but the
           values themselves; they are copied when they are about to change while somebody holds them, who then has the old ones
           to himself. So a pull costs nothing where its reply has left before the next update, and several pulls of one version
           share it. torch needs one or two arrays more while it updates; a server updates one range at a time.
Cost:      of SGD one pass: gradients are read where the wire has put them.
Invariant: `apply` and `install` change everything or, if they raise, nothing. After `install(export())` the next update gives the
           same bits. The bits do not depend on how a tensor was cut into ranges, as long as torch runs in one thread
           (torch.set_num_threads(1); a server is one of several processes on its machine anyway).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.aggregate.parameter_server import range_format, read_only
from stretto.aggregate.parameter_server.compensation import Compensation
from stretto.aggregate.parameter_server.gradient_sum import check_gradient
from stretto.aggregate.parameter_server.range_format import RangeContent
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec, OptionValue
from stretto.engine.postponed_step import plain_step
from stretto.errors import ConfigurationError, MalformedPayload
from stretto.sync.delay_compensation import DelayCompensation

ASSIGN: Final = "assign"  # the option of a range without an optimizer

Floats = NDArray[np.float32]


def fault_in_increment(options: Mapping[str, OptionValue]) -> str | None:
    """Why these are no options of a range without an optimizer."""
    if options.keys() <= {ASSIGN} and isinstance(options.get(ASSIGN, False), bool):
        return None
    return (
        f"options {sorted(map(str, options))[:10]} for a range without an optimizer, which has {ASSIGN}, a flag, and no others."
    )


class RangeState:
    """Begins with a copy of `values`, which are float32. `optimizer`: None to add what is pushed."""

    def __init__(
        self, values: Tensor, optimizer: OptimizerSpec | None, *, delay_compensation: DelayCompensation | None = None
    ) -> None:
        _check(values, optimizer, delay_compensation)
        self._values: Floats = values.detach().cpu().reshape(-1).numpy().copy()
        self._lent: weakref.ref[Floats] | None = None  # the values as they were handed out; nobody holds them if it is dead
        self._parameter = nn.Parameter(torch.from_numpy(self._values))
        self._spec = optimizer
        self._optimizer = None if optimizer is None else optimizer.build(self._parameter)
        self._made_with = {} if optimizer is None else optimizer.options_of(self._group)
        self._compensation = None if delay_compensation is None else Compensation(delay_compensation, self.size)

    @property
    def size(self) -> int:
        """Elements, of 4 bytes."""
        return self._values.size

    # -- updates ------------------------------------------------------------------------------------------------------

    def apply(
        self,
        gradient: Floats,
        options: Mapping[str, OptionValue],
        *,
        lr_scale: float = 1.0,
        worker: int | None = None,
    ) -> None:
        """Update with one gradient, which is only read. `worker`: who computed it, on what it pulled last."""
        check_gradient(gradient, self.size)
        checked = self._checked(options, lr_scale)
        if self._compensation is not None:
            gradient = self._compensation.compensated(gradient, self._values, worker)
        self._leave_to_readers()
        if checked.get(ASSIGN):
            self._parameter.detach().copy_(read_only.as_tensor(gradient))
        elif self._optimizer is None:
            self._parameter.detach().add_(read_only.as_tensor(gradient), alpha=lr_scale)
        else:
            self._step(gradient, checked)

    def _checked(self, options: Mapping[str, OptionValue], lr_scale: float) -> dict[str, Any]:
        """All options of this step, or an error before anything has changed."""
        if not 0 <= lr_scale <= 1:
            raise MalformedPayload(f"lr_scale={lr_scale}: a learning rate is scaled by a number from 0 to 1.")
        if self._spec is None:
            if wrong := fault_in_increment(options):
                raise MalformedPayload(wrong)
            return dict(options)
        if wrong := self._spec.fault_in(options) or self._change_of_state(options):
            raise MalformedPayload(f"an update with {self._spec.name}: {wrong} Nothing was updated.")
        if lr_scale != 1 and not self._spec.obeys_rate:
            raise MalformedPayload(
                f"lr_scale={lr_scale} with {self._spec.name}: it keeps a rate in its state, so the rate of one gradient cannot "
                f"be scaled.\nUse an optimizer like torch.optim.SGD, or do not scale rates by staleness."
            )
        all_options: dict[str, Any] = {**self._made_with, **options}
        all_options["lr"] *= lr_scale
        return all_options

    def _change_of_state(self, options: Mapping[str, OptionValue]) -> str | None:
        """An option that was off in the first update, and needs state that would have had to begin then."""
        assert self._spec is not None
        state = self._state
        for option, vector in self._spec.kind.optional.items():
            value = options.get(option, self._made_with[option])
            if state and value and vector not in state:
                return f"{option}={value} after an update without it: the optimizer has no {vector} to go on with."
        return None

    def _step(self, gradient: Floats, options: dict[str, Any]) -> None:
        assert self._optimizer is not None
        self._group.update(options)
        self._parameter.grad = read_only.as_tensor(gradient)
        try:
            plain_step(self._optimizer)(self._optimizer)
        finally:
            self._parameter.grad = None  # the memory is the wire's

    @property
    def _group(self) -> dict[str, Any]:
        assert self._optimizer is not None
        return self._optimizer.param_groups[0]

    @property
    def _state(self) -> dict[str, Tensor]:
        """The optimizer's. `get`, for it would make an entry for what is not there."""
        state: dict[str, Tensor] = {} if self._optimizer is None else self._optimizer.state.get(self._parameter, {})
        return state

    # -- who holds the values -----------------------------------------------------------------------------------------

    def value(self) -> memoryview:
        """The values as bytes, which no later update changes. They cannot be written."""
        return self._lend().data.cast("B") if self.size else memoryview(b"")

    def pulled_by(self, worker: int) -> None:
        """This worker has the current values now, and computes on them. Costs nothing without delay compensation."""
        if self._compensation is not None:
            self._compensation.backups[worker] = self._lend()

    def forget(self, worker: int) -> None:
        """This worker has left."""
        if self._compensation is not None:
            self._compensation.backups.pop(worker, None)

    def _lend(self) -> Floats:
        """One array for all who hold this version: while it is alive, somebody does. (An array over it would not keep it alive,
        as numpy refers to the array that owns the memory; a memoryview does.)"""
        lent = None if self._lent is None else self._lent()
        if lent is None:
            lent = self._values.view()
            lent.flags.writeable = False
            self._lent = weakref.ref(lent)
        return lent

    def _leave_to_readers(self) -> None:
        """Go on with a copy if somebody holds the values."""
        if self._lent is not None and self._lent() is not None:
            self._replace(self._values.copy())

    def _replace(self, values: Floats) -> None:
        self._values = values
        self._lent = None
        self._parameter.data = torch.from_numpy(values)

    # -- as bytes -----------------------------------------------------------------------------------------------------

    def export(self) -> bytes:
        """Values, optimizer state and backups, for `install`."""
        kept = self._compensation
        content = RangeContent(
            values=self._values,
            scalars={name: value.item() for name, value in self._state.items() if value.ndim == 0},
            vectors={name: value.numpy() for name, value in self._state.items() if value.ndim},
            mean_square=None if kept is None else kept.mean_square,
            backups={} if kept is None else kept.backups,
        )
        return range_format.encode(content, self._spec)

    def install(self, data: memoryview) -> None:
        """Become what was exported, from a range of the same size and settings. Raises `MalformedPayload` for anything else."""
        kept = self._compensation
        content = range_format.decode(
            data,
            self.size,
            self._spec,
            has_mean_square=kept is not None and kept.mean_square is not None,
            has_backups=kept is not None,
        )
        state = _as_state(content)
        self._replace(content.values.astype(np.float32))
        if self._optimizer is not None:
            self._optimizer.state[self._parameter] = state
        if kept is not None:
            kept.mean_square = None if content.mean_square is None else content.mean_square.astype(np.float32)
            kept.backups = self._installed_backups(content)

    def _installed_backups(self, content: RangeContent) -> dict[int, Floats]:
        """One copy of each version, and the current one is lent."""
        versions = {content.values.ctypes.data: self._lend()}
        for backup in content.backups.values():
            if backup.ctypes.data not in versions:
                versions[backup.ctypes.data] = backup.astype(np.float32)
        return {worker: versions[backup.ctypes.data] for worker, backup in content.backups.items()}


def _as_state(content: RangeContent) -> dict[str, Tensor]:
    """As torch keeps it: a copy, and scalars in at least float32."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    scalars = {name: torch.tensor(value, dtype=dtype) for name, value in content.scalars.items()}
    return scalars | {name: torch.from_numpy(vector.astype(np.float32)) for name, vector in content.vectors.items()}


def _check(values: Tensor, optimizer: OptimizerSpec | None, delay_compensation: DelayCompensation | None) -> None:
    if values.dtype != torch.float32:
        raise ConfigurationError(f"a range of {values.dtype}: servers keep float32. Convert the values: values.float().")
    if optimizer is None and delay_compensation is not None:
        raise ConfigurationError(
            f"{delay_compensation!r} for a range without an optimizer: what is pushed there is added, and is no gradient that "
            f"could be corrected.\nGive the range an OptimizerSpec, or leave the delay compensation out."
        )
