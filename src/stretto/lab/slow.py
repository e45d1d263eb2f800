"""A slow host: the same work, stopped most of the time.

A host slowed by a factor f runs for 1/f of every period of 40 ms and is stopped (SIGSTOP) for the rest. The period is
far below the second between heartbeats, so a slow host stays alive to its peers, and long enough for the scheduler to
follow.

Signals arrive late on a busy machine. What was run too long is stopped longer: the next stop lasts (f - 1) times the
run just measured, less what the stop before was too long, so the ratio holds over time although single slices do not.
"""

from __future__ import annotations

from stretto.errors import ConfigurationError

PERIOD_S = 0.040
MAX_FACTOR = 40.0  # a run slice of 1 ms: shorter ones are lost in the scheduler's noise


def parse_slow(text: str) -> tuple[int, float]:
    """Host and factor of "1=4x".

    >>> parse_slow("1=4x")
    (1, 4.0)
    """
    host, _, factor = text.partition("=")
    try:
        return int(host), check_factor(float(factor.removesuffix("x")))
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"--slow {text!r} cannot be read: it names a host and how many times slower it is to be.\n"
            f"Write for instance --slow 1=4x: host 1 runs a quarter of the time."
        ) from None


def check_factor(factor: float) -> float:
    if not 1.0 <= factor <= MAX_FACTOR:
        raise ConfigurationError(
            f"a host cannot be made {factor:g} times slower: it runs for 1/factor of every {PERIOD_S * 1000:g} ms, and "
            f"slices below 1 ms are lost in the scheduler's noise.\nUse a factor from 1 (full speed) to {MAX_FACTOR:g}."
        )
    return factor


class DutyCycle:
    """When to stop and when to continue. Knows no processes and no clock: `turn(now)` at `due`."""

    def __init__(self, factor: float, now: float) -> None:
        self.factor = check_factor(factor)
        self.running = True
        self.due = now + PERIOD_S / factor
        self._since = now
        self._overslept_s = 0.0

    def turn(self, now: float) -> bool:
        """Change over; True when the host runs from now on."""
        elapsed = now - self._since
        if self.running:
            stop_s = elapsed * (self.factor - 1) - self._overslept_s
            self._overslept_s = max(0.0, -stop_s)  # nothing left to stop: carried on
            self._planned_s = max(0.0, stop_s)
            self.due = now + self._planned_s
        else:
            self._overslept_s = min(PERIOD_S, elapsed - self._planned_s)
            self.due = now + PERIOD_S / self.factor
        self.running = not self.running
        self._since = now
        return self.running
