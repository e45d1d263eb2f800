"""Strategy: five questions about data-parallel training, answered by five small values.

    aggregate   whose values are combined, and by whom?      AllReduce(algorithm)
    sync        when?                                        Synchronous()
    compress    how is it written on the wire?               NoCompression(), Float16(), Int8(), ErrorFeedback(Sign()), ...
    schedule    in which order, and over what?               AfterBackward(), WaitFree(), Buckets(bytes)
    shard       where does model state live?                 Replicated()

A strategy is frozen, hashable and printable; it is the configuration. `repr` reads back with `parse`, which knows the
names above and nothing else: a command line, a log line and a plan all speak the same language.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass, field, fields

from stretto.aggregate.all_reduce import AllReduce
from stretto.compress import catalogue
from stretto.compress.codec import Compression
from stretto.compress.none import NoCompression
from stretto.errors import ConfigurationError
from stretto.schedule.orders import AfterBackward, Buckets, Schedule, WaitFree
from stretto.shard.replicated import Replicated
from stretto.sync.synchronous import Synchronous

ANSWERS: dict[str, tuple[type, ...]] = {
    "aggregate": (AllReduce,),
    "sync": (Synchronous,),
    "compress": catalogue.classes(),
    "schedule": (AfterBackward, WaitFree, Buckets),
    "shard": (Replicated,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How to train data-parallel. The default is synchronous all-reduce in buckets: exactly large-batch training."""

    aggregate: AllReduce = field(default_factory=AllReduce)
    sync: Synchronous = field(default_factory=Synchronous)
    compress: Compression = field(default_factory=NoCompression)
    schedule: Schedule = field(default_factory=Buckets)
    shard: Replicated = field(default_factory=Replicated)

    def __post_init__(self) -> None:
        for axis in fields(self):
            value = getattr(self, axis.name)
            kinds = (Compression,) if axis.name == "compress" else ANSWERS[axis.name]  # a user's own codec is one too
            if not isinstance(value, kinds):
                raise ConfigurationError(_wrong_answer(axis.name, value))
        self._check_payloads()

    def _check_payloads(self) -> None:
        """Whether what the compression sends can be combined by the algorithm that was asked for."""
        algorithm = self.aggregate.algorithm
        reason = None if algorithm == "auto" else self.compress.refusal(algorithm)
        if reason is not None:
            raise ConfigurationError(
                f"aggregate={self.aggregate!r} with compress={self.compress!r}: {reason}.\n"
                f"Write aggregate=AllReduce(), which exchanges payloads in the way that suits them."
            )

    @property
    def digest(self) -> str:
        """The same on all ranks, or they are not doing the same."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def _wrong_answer(axis: str, value: object) -> str:
    choices = ", ".join(f"{kind.__name__}({'...' if _needs_arguments(kind) else ''})" for kind in ANSWERS[axis])
    hint = ""
    if isinstance(value, type) and value in ANSWERS[axis]:
        hint = f" Did you mean {value.__name__}(), with parentheses?"
    for other, kinds in ANSWERS.items():
        if isinstance(value, kinds):
            hint = f" It answers another question: write {other}={value!r}."
    return f"Strategy({axis}={value!r}): not an answer to that question.{hint}\nWrite {axis}= one of {choices}."


def _needs_arguments(kind: type) -> bool:
    parameters = list(inspect.signature(kind).parameters.values())
    return any(one.default is one.empty for one in parameters)
