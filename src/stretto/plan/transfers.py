"""A schedule's plan, as data: which gradients travel together, in which order, and in what parts.

    Gradient        what there is to send: a parameter's name, its bytes, and with what it may share a transfer
    Transfer        gradients that travel as one collective
    TransferPlan    all of them, in the order in which they are expected to be ready

All workers hold the same plan: transfers are collectives, and these must have the same members everywhere. Their *order* need not
be the same, because collectives carry their name; each worker sends what is ready, smaller priorities first.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Gradient(msgspec.Struct, frozen=True):
    """A parameter whose gradient is to be sent. Only gradients of one `kind` (dtype, device, codec) may share a transfer."""

    name: str
    num_bytes: int
    kind: str = ""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One collective. `priority`: among transfers that are ready, smaller numbers go first; `part_bytes`: it is sent in parts of
    at most so many bytes, between which another transfer may go first (None: as the wire likes)."""

    parameters: tuple[str, ...]
    num_bytes: int
    priority: int = 0
    part_bytes: int | None = None


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a schedule has decided for one model. `schedule` is its text, `reason` a sentence on how it came to this.

    `early`: a transfer begins when its last gradient is there, and not when backward has ended. `credit_bytes`: so many bytes may
    be on their way to one worker before what is less urgent has to wait (None: no limit, so first come, first served)."""

    schedule: str
    transfers: tuple[Transfer, ...]
    early: bool = True
    credit_bytes: int | None = None
    reason: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(transfer.num_bytes for transfer in self.transfers)

    def check(self, gradients: Iterable[Gradient]) -> None:
        """Every gradient is in exactly one transfer, and no transfer has two kinds."""
        by_name = {gradient.name: gradient for gradient in gradients}
        planned = [name for transfer in self.transfers for name in transfer.parameters]
        assert sorted(planned) == sorted(by_name), f"{self.schedule} has planned other parameters than there are"
        for transfer in self.transfers:
            assert len({by_name[name].kind for name in transfer.parameters}) <= 1, f"a transfer of two kinds in {self.schedule}"

    def __str__(self) -> str:
        """A table, one line for each transfer."""
        head = f"{self.schedule}: {len(self.transfers)} transfers, {self.num_bytes:,} bytes" + (
            f" ({self.reason})" if self.reason else ""
        )
        lines = [head, f"{'#':>4} {'priority':>8} {'bytes':>13} {'parts':>6}  parameters"]
        for number, transfer in enumerate(self.transfers):
            parts = 1 if transfer.part_bytes is None else -(-transfer.num_bytes // transfer.part_bytes)
            names = transfer.parameters
            what = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            lines.append(f"{number:4} {transfer.priority:8} {transfer.num_bytes:13,} {parts:6}  {what}")
        return "\n".join(lines)
