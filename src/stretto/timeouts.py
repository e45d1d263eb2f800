"""One value for every deadline."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long stretto waits for what. All in seconds.

    ==============  =======  ==============================================================
    field           default  what happens then
    ==============  =======  ==============================================================
    `meet_s`           600   the workers meet at the rendezvous: `JobError` that says who is missing
    `connect_s`         60   all have met, and connect to each other: `UnreachableError`
    `silence_s`         30   nothing, not even a heartbeat, from a peer: it is lost (`PeerLost`)
    `warn_s`            30   a warning "still waiting for rank k", then again every `warn_s`
    `arrive_s`         600   a peer that is alive did not arrive: `WireTimeout`
    `leave_s`            5   saying goodbye at shutdown
    ==============  =======  ==============================================================

    >>> Timeouts.of(60).arrive_s
    60.0
    """

    meet_s: float = 600.0
    connect_s: float = 60.0
    silence_s: float = 30.0
    warn_s: float = 30.0
    arrive_s: float = 600.0
    leave_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("meet_s", "connect_s", "silence_s", "warn_s", "arrive_s", "leave_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigurationError(
                    f"Timeouts({name}={value!r}): a timeout is a positive number of seconds; "
                    f"nothing in stretto waits for ever. Write for instance Timeouts({name}=60)."
                )
        if self.silence_s < 0.5:
            raise ConfigurationError(
                f"Timeouts(silence_s={self.silence_s}): heartbeats faster than every 0.1 s would find live peers dead "
                f"on a busy machine. Use at least silence_s=0.5."
            )

    @classmethod
    def of(cls, seconds: float) -> Timeouts:
        """All deadlines from the one number people think of: how long to wait for a peer that is alive."""
        seconds = float(seconds)
        return cls(
            meet_s=max(10.0, seconds),
            connect_s=max(10.0, seconds),
            silence_s=max(0.5, min(30.0, seconds)),
            warn_s=max(0.5, min(30.0, seconds / 2)),
            arrive_s=seconds,
        )
