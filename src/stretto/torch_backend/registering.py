"""Tells torch of the backend, at the price of nothing.

`import stretto` does not import torch: the launcher and the coordinator do without. So torch is told when `torch.distributed` is
there, at once or as soon as somebody imports it: a finder notices that import, lets it take place, and is gone. What torch is
told is a name and a function; the rest is imported when a group is made.

Also told: how to meet without `RANK`, `WORLD_SIZE` and `MASTER_ADDR`. `init_method="stretto://"` is the job that `stretto.init()`
joins, under every launcher that it knows. `env://`, torch's default, is asked only where it would fail: under Slurm and MPI, and
in a process that has joined a job.

And two functions of torch's that would refuse or mishandle what is ours are asked here first, and get everything else as ever:
`monitored_barrier`, which takes gloo's groups only, and the one beneath `torch.futures.collect_all` and `wait_all`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "stretto"
MODULE = "torch.distributed"


def tell_torch() -> None:
    """Register the backend, now or when `torch.distributed` is imported."""
    module = sys.modules.get(MODULE)
    if module is None:
        sys.meta_path.insert(0, _OnImport())
    else:
        _register(module)


class _OnImport:
    """Notices the first import of `torch.distributed`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute: Callable[[ModuleType], None] = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the loader is as it was
                execute(module)
                _register(module)

            loader.exec_module = exec_module
        return spec


def _register(module: Any) -> None:
    if not hasattr(module, "Backend") or hasattr(module.Backend, NAME.upper()):
        return  # a torch without torch.distributed; or it knows already
    module.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    module.register_rendezvous_handler(NAME, _meet)
    handlers = sys.modules[f"{MODULE}.rendezvous"].__dict__["_rendezvous_handlers"]
    handlers["env"] = _or_else(handlers["env"])
    in_c = sys.modules["torch._C"]
    in_c.__dict__["_collect_all"] = _combining(in_c.__dict__["_collect_all"])
    module.monitored_barrier = module.distributed_c10d.monitored_barrier = _monitored_barrier(module.distributed_c10d)


def _create(opts: Any, options: object) -> Any:
    from stretto.torch_backend.joining import create

    return create(opts, options)


def _meet(url: str, timeout: Any = None, **options: Any) -> Iterator[tuple[Any, int, int]]:
    from stretto.torch_backend.meeting_place import meet

    yield meet(timeout)


def _or_else(by_environment: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """`env://` as torch has it, and what to do where it would fail."""

    def handler(url: str, timeout: Any = None, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from stretto.launching.detect import can_meet_without_torch

        api = sys.modules.get("stretto.api")
        is_in_job = api is not None and api.job_here() is not None
        if "rank=" not in url and can_meet_without_torch(is_in_job=is_in_job):
            return _meet(url, timeout, **options)
        return by_environment(url, timeout=timeout, **options)

    return handler


def _combining(collect_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`torch.futures.collect_all`, in C++, and what to do with futures of ours."""

    def collect(futures: Any) -> Any:
        futures = list(futures)  # of a generator nothing would be left after the question below
        ours = sys.modules.get("stretto.torch_backend.future")  # imported with the first group; before, there are none
        if ours is not None and any(isinstance(future, ours.TransferFuture) for future in futures):
            from stretto.torch_backend.combining import CombinedFuture

            return CombinedFuture(futures)
        return collect_all(futures)

    return collect


def _monitored_barrier(c10d: Any) -> Callable[..., None]:
    """torch's function refuses every backend but gloo before it asks; a group of ours has the method."""
    of_torch = c10d.monitored_barrier

    @functools.wraps(of_torch)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        ours = sys.modules.get("stretto.torch_backend.process_group")  # imported with the first group
        asked = c10d.GroupMember.WORLD if group is None else group
        if ours is not None and isinstance(asked, ours.StrettoGroup):
            asked.monitored_barrier(_as_timedelta(timeout), wait_all_ranks=wait_all_ranks)
        else:
            of_torch(group, timeout, wait_all_ranks)

    return monitored_barrier


def _as_timedelta(timeout: Any) -> timedelta | None:
    """torch takes a number of seconds here too."""
    return timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
