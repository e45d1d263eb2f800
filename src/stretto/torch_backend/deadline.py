"""The `timeout=` of torch's calls that make groups."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from stretto.errors import ConfigurationError
from stretto.timeouts import Timeouts


def own_deadline(timeout: timedelta | None) -> float | None:
    """In seconds. None where nothing was said, which torch writes as its default, too: then another's deadline holds."""
    if timeout is None or timeout == dist.distributed_c10d.default_pg_timeout:
        return None
    refuse_no_time(timeout)
    return timeout.total_seconds()


def refuse_no_time(timeout: timedelta) -> None:
    """Torch takes a timeout of nothing for "no limit" in one place and for "at once" in another; here it is an error in all."""
    if timeout.total_seconds() <= 0:
        raise ConfigurationError(
            f'a process group of the backend "stretto" with timeout={timeout!r}: no worker could come in time.\n'
            f"Give more than nothing, or leave it out: then it is the job's, {Timeouts().arrive_s:g} s if nothing else was said."
        )
