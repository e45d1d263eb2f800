"""What a worker adds to a snapshot: which model it is, the options of this moment, and its buffers, which no server has.

It is asked for in the thread that takes snapshots, and must not keep a model alive that the program has dropped: so it refers
weakly to the model and its optimizers, and has everything else as plain values.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

import stretto
from stretto.aggregate.parameter_server.inventory import Inventory
from stretto.aggregate.parameter_server.layout import ParameterRange
from stretto.aggregate.parameter_server.network import ServerNetwork
from stretto.aggregate.parameter_server.snapshot_content import (
    SnapshotHeader,
    buffer_bytes,
    saved_parameters,
    saved_ranges,
    saved_tensor,
)
from stretto.aggregate.parameter_server.snapshots import SnapshotTaker, Subject
from stretto.aggregate.parameter_server.training import servers_of
from stretto.engine.training import Setting
from stretto.job import Job
from stretto.protocol.loop import Running
from stretto.sync.asynchronous import Asynchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class SubjectOfModel:
    """Call it for what there is to add now; None when the model is gone."""

    def __init__(self, header: SnapshotHeader, model: nn.Module, inventory: Inventory, optimizers: Sequence[Optimizer]) -> None:
        self._header = header
        self._model = weakref.ref(model)
        self._specs = inventory.bases
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

    def __call__(self) -> Subject | None:
        model, optimizers = self._model(), [reference() for reference in self._optimizers]
        if model is None:
            return None
        options = []
        for spec, optimizer in zip(self._specs, optimizers, strict=True):
            if optimizer is None:
                return None
            options.append([spec.options_of(group) for group in optimizer.param_groups])
        wanted = {each.name for each in self._header.buffers}
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in wanted}
        header = msgspec.structs.replace(
            self._header,
            options=options,
            taken_at=time.time(),
            buffers=[saved_tensor(name, buffer) for name, buffer in buffers.items()],
        )
        return Subject(header, {name: buffer_bytes(buffer) for name, buffer in buffers.items()})


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that belong to the state_dict."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def begin_snapshots(
    strategy: Strategy,
    job: Job,
    setting: Setting,
    network: ServerNetwork,
    service: Running,
    inventory: Inventory,
    ranges: Sequence[ParameterRange],
    steps_before: int,
) -> SnapshotTaker | None:
    """Take snapshots of what these servers have, if they are asked for. On all workers: one of them does it."""
    servers, sync = servers_of(strategy), strategy.sync
    if servers.snapshots is None:
        return None
    method = sync.delay_compensation if isinstance(sync, Asynchronous) else None
    optimizers = setting.loop.optimizers
    header = SnapshotHeader(
        stretto=stretto.__version__,
        model=setting.name,
        strategy=repr(strategy),
        world_size=job.world_size,
        taken_at=0.0,
        steps_before=steps_before,
        decays=method is not None and method.decay is not None,
        compensates=method is not None,
        optimizers=[type(optimizer).__name__ for optimizer in optimizers],
        options=[],
        parameters=saved_parameters(inventory.entries, optimizers),
        ranges=saved_ranges(ranges),
        buffers=[saved_tensor(name, buffer) for name, buffer in saved_buffers(setting.model).items()],
    )
    taker = SnapshotTaker(
        Path(os.path.abspath(servers.snapshots)),
        servers.every_s,
        setting.name,
        len(ranges),
        request=service.request,
        subject=SubjectOfModel(header, setting.model, inventory, optimizers),
        is_mine=lambda: not job.closed and network.is_first_worker(),
        patience_s=job.timeouts.arrive_s,
    )
    job.threads.add(taker)
    taker.start()
    return taker
