"""Ways of other libraries to train, as contenders of `race.py`: none of them is a dependency, each is imported where it runs.

    DDP; DDP, fp16 hook; PeriodicModelAverager
                                           torch's own
    torchft DiLoCo; torchft streaming DiLoCo; torchft LocalSGD
                                           torchft's, each worker a replica group of its own; rank 0 runs the lighthouse
    hivemind                               hivemind's Optimizer with local updates, each worker a peer; rank 0 is whom others find

Packages may lie in a folder of their own, which `race.py --peers FOLDER` names; it is searched last, so none of it replaces what
is installed. `python -m pip install --target FOLDER --no-deps -r benchmarks/race_peers.txt` puts there what torchft 0.2.0 and
hivemind 1.1.12 import, without another torch.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stretto.job import Job
from stretto.lab.network import address

EVERY = 20  # steps between averages, as in the contenders that they are compared with
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
LIGHTHOUSE_PORT = 29700
PATIENCE = datetime.timedelta(seconds=120)


class Peer:
    """Another library's way to train: how the model is called, the optimizer that is stepped, and what follows a step. As it is,
    no communication."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def model(self, core: nn.Module) -> nn.Module:
        return core

    def stepped(self) -> None:
        """The optimizer has stepped."""

    def ended(self) -> None:
        """No step comes any more, here."""


class Ddp(Peer):
    def __init__(self, core: nn.Module, optimizer: Optimizer, job: Job, *, half: bool = False) -> None:
        super().__init__(optimizer)
        self._half = half

    def model(self, core: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(core, gradient_as_bucket_view=True)
        if self._half:
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped


class Averager(Peer):
    """Its first average would be after the first step, when all are equal but for one step; `EVERY` - 1 are left out before."""

    def __init__(self, core: nn.Module, optimizer: Optimizer, job: Job) -> None:
        super().__init__(optimizer)
        self._parameters = list(core.parameters())
        self._averager = PeriodicModelAverager(period=EVERY, warmup_steps=EVERY - 1)

    def stepped(self) -> None:
        self._averager.average_parameters(self._parameters)


class TorchFt(Peer):
    """`fragments`: 0 for LocalSGD, 1 for DiLoCo, as many as blocks for Streaming DiLoCo."""

    def __init__(self, core: nn.Module, optimizer: Optimizer, job: Job, *, kind: str) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo, LocalSGD

        super().__init__(optimizer)
        own = address(job.rank)
        self._lighthouse = None
        if job.rank == 0:
            bind = f"0.0.0.0:{LIGHTHOUSE_PORT}"
            self._lighthouse = LighthouseServer(bind=bind, min_replicas=job.world_size, join_timeout_ms=60_000, quorum_tick_ms=10)
        job.barrier()
        self._store = torch.distributed.TCPStore(own, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE), load_state_dict=None, state_dict=None, min_replica_size=job.world_size,
            use_async_quorum=False, timeout=PATIENCE, quorum_timeout=PATIENCE, connect_timeout=PATIENCE, rank=0, world_size=1,
            store_addr=own, store_port=self._store.port, lighthouse_addr=f"http://{address(0)}:{LIGHTHOUSE_PORT}",
            replica_id=f"replica{job.rank}", hostname=own, init_sync=False,
        )  # fmt: skip
        if kind == "LocalSGD":
            self._around: Any = LocalSGD(self._manager, core, optimizer, sync_every=EVERY)
        else:
            fragments = [core] if kind == "DiLoCo" else _fragments(core)
            outer = [torch.optim.SGD(each.parameters(), **OUTER) for each in fragments]
            delay = 0 if kind == "DiLoCo" else EVERY // len(fragments) - 1
            self._around = DiLoCo(
                self._manager, fragments, optimizer, outer, sync_every=EVERY, pin_memory=False,
                fragment_sync_delay=delay, fragment_update_alpha=0.0 if kind == "DiLoCo" else 0.5,
            )  # fmt: skip
        self._around.__enter__()

    def ended(self) -> None:
        self._around.__exit__(None, None, None)
        self._manager.shutdown(wait=False)


def _fragments(core: nn.Module) -> list[nn.Module]:
    """Two halves of the parameters, for the period has to be a multiple of their number."""
    parameters = list(core.parameters())
    middle = len(parameters) // 2
    return [nn.ParameterList(parameters[:middle]), nn.ParameterList(parameters[middle:])]


class Hivemind(Peer):
    """Local updates, and an average of parameters in the background once all workers together have seen `EVERY` batches each.

    Its shares of an average come from a linear program, which it asks SciPy to solve in a way that SciPy has no more. Peers that
    are equal get equal shares, and ours are."""

    def __init__(self, core: nn.Module, optimizer: Optimizer, job: Job, *, rows: int = 8) -> None:
        with suppress(ImportError):
            import scipy.optimize  # noqa: F401
        sys.modules.setdefault("scipy.optimize", ModuleType("scipy.optimize"))
        sys.modules.setdefault("scipy", ModuleType("scipy"))
        import hivemind
        from hivemind.averaging import load_balancing

        load_balancing.optimize_parts_lp = lambda size, bandwidths, least=0: np.ones(len(bandwidths))
        maddrs = [f"/ip4/{address(job.rank)}/tcp/0"]
        first = hivemind.DHT(start=True, host_maddrs=maddrs) if job.rank == 0 else None
        known = job.gather_object([str(each) for each in first.get_visible_maddrs()] if first is not None else None)[0]
        dht = first or hivemind.DHT(start=True, host_maddrs=maddrs, initial_peers=known)
        wrapped = hivemind.Optimizer(
            dht=dht, run_id="race", batch_size_per_step=rows, target_batch_size=rows * EVERY * job.world_size,
            optimizer=optimizer, use_local_updates=True, matchmaking_time=1.0, averaging_timeout=30.0,
            averager_opts={"request_timeout": 0.5, "target_group_size": job.world_size},
        )  # fmt: skip
        super().__init__(wrapped)
        self._dht = dht
        time.sleep(1.0)

    def ended(self) -> None:
        self.optimizer.shutdown()  # type: ignore[attr-defined]
        self._dht.shutdown()


PEERS: dict[str, Callable[[nn.Module, Optimizer, Job], Peer]] = {
    "DDP": Ddp,
    "DDP, fp16 hook": lambda core, optimizer, job: Ddp(core, optimizer, job, half=True),
    "PeriodicModelAverager": Averager,
    "torchft LocalSGD": lambda core, optimizer, job: TorchFt(core, optimizer, job, kind="LocalSGD"),
    "torchft DiLoCo": lambda core, optimizer, job: TorchFt(core, optimizer, job, kind="DiLoCo"),
    "torchft streaming DiLoCo": lambda core, optimizer, job: TorchFt(core, optimizer, job, kind="streaming"),
    "hivemind": Hivemind,
}


def made(name: str, core: nn.Module, optimizer: Optimizer, job: Job, folder: str | None) -> Peer:
    if folder is not None:
        sys.path.append(str(Path(folder).resolve()))
    return PEERS[name](core, optimizer, job)
