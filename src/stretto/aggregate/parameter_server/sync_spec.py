"""An answer to `sync=` as data: its name, one of those below, and plain numbers. Servers read it, and evaluate nothing."""

from __future__ import annotations

from typing import Final

import msgspec

from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.errors import ConfigurationError
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous

KNOWN: Final = ("Synchronous", "StaleSynchronous", "Asynchronous", "SoftSync", "BackupWorkers")


class SyncSpec(msgspec.Struct, frozen=True):
    """`number`: the bound, n or spare. `compensation`: strength and decay. What an answer does not have is left out."""

    name: str = "Synchronous"
    number: int = 0
    staleness_aware: bool = False
    compensation: tuple[float, float | None] | None = None

    @classmethod
    def of(cls, sync: SyncAnswer) -> SyncSpec:
        name = type(sync).__name__
        match sync:
            case StaleSynchronous(number) | SoftSync(number) | BackupWorkers(number):
                return cls(name, number)
            case Asynchronous(staleness_aware, method):
                return cls(name, 0, staleness_aware, None if method is None else (method.strength, method.decay))
        return cls(name)

    def build(self) -> SyncAnswer:
        """Raises `ConfigurationError` for what no answer is."""
        match self.name:
            case "Synchronous":
                return Synchronous()
            case "StaleSynchronous":
                return StaleSynchronous(self.number)
            case "SoftSync":
                return SoftSync(self.number)
            case "BackupWorkers":
                return BackupWorkers(self.number)
            case "Asynchronous":
                method = None if self.compensation is None else DelayCompensation(*self.compensation)
                return Asynchronous(self.staleness_aware, method)
        raise ConfigurationError(f"SyncSpec({self.name[:100]!r}): servers know {', '.join(KNOWN)}, and no other answer to sync=.")
