"""Each parameter its own compression, by name.

    ByParameter(("*.bias", NoCompression()), ("head.*", Float16()), ("*", ErrorFeedback(Sign())))

Patterns are those of the shell, case-sensitive: `*` any characters, dots too, `?` one, `[ab]` one of these. The first that
matches a parameter's name decides; a parameter that none matches is not compressed. Parameters with equal answers share buckets,
so this costs nothing beyond a bucket more for each answer.

It chooses and does nothing else: bytes, memory and invariants are those of what it chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from stretto.compress.codec import Compression
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.rounds import ExchangeContext, Steps
from stretto.compress.state import CompressionState, Exported
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True, init=False, repr=False)
class ByParameter(Compression):
    """`rules`: pairs of a pattern and a compression, in the order in which they are tried."""

    rules: tuple[tuple[str, Compression], ...]

    def __init__(self, *rules: tuple[str, Compression]) -> None:
        if not rules:
            raise ConfigurationError(
                "ByParameter(): it has no rules, so nothing would be compressed.\n"
                "Write NoCompression(), or rules: ByParameter(('*.bias', NoCompression()), ('*', ErrorFeedback(Sign())))."
            )
        for rule in rules:
            _check(rule)
        _check_momentum(rules)
        object.__setattr__(self, "rules", tuple((pattern, compression) for pattern, compression in rules))

    def __repr__(self) -> str:
        return f"ByParameter({', '.join(repr(rule) for rule in self.rules)})"

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return all(compression.lossless for _, compression in self.rules)

    @property
    def optimizer_hint(self) -> str | None:  # type: ignore[override]
        """The same for all rules."""
        return self.rules[0][1].optimizer_hint

    @property
    def no_abstention(self) -> str | None:  # type: ignore[override]
        reasons = (compression.no_abstention for _, compression in self.rules)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def no_residual(self) -> str | None:  # type: ignore[override]
        return "it chooses for each parameter: write ErrorFeedback around the codecs inside"

    @property
    def flat_kinds(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(compression.flat_kinds for _, compression in self.rules))

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        for pattern, compression in self.rules:
            if fnmatchcase(name, pattern):
                return compression.for_parameter(name, shape)
        if self.optimizer_hint is not None:
            raise ConfigurationError(
                f"{self!r}: no rule matches {name!r}. It would not be compressed, while others bring a momentum of their own, "
                f"and no optimizer is right for both.\nAdd a last rule for all the rest: ('*', {self.rules[-1][1]!r})."
            )
        return NoCompression()

    def refusal(self, algorithm: str) -> str | None:
        reasons = (compression.refusal(algorithm) for _, compression in self.rules)
        return next((reason for reason in reasons if reason is not None), None)

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        """For a bucket whose parameters all have the same answer."""
        yield from self._answer(context.layout).exchange(values, context)

    def restore(self, state: CompressionState, own: Exported, shared: Exported, rank: int, world_size: int) -> None:
        self._answer(state.layout).restore(state, own, shared, rank, world_size)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        """With one bucket for each answer."""
        total = 0
        for answer, part in self._answers(layout).items():
            sent = answer.bytes_sent(part, rank, world_size, algorithm)
            if sent is None:
                return None
            total += sent
        return total

    def _answer(self, layout: Layout) -> Compression:
        answers = list(self._answers(layout))
        if len(answers) > 1:
            raise ConfigurationError(
                f"{self!r}: one bucket holds parameters that are compressed differently: {', '.join(map(repr, answers))}.\n"
                f"Put only parameters with equal for_parameter(name, shape) into a bucket."
            )
        return answers[0] if answers else NoCompression()

    def _answers(self, layout: Layout) -> Mapping[Compression, Layout]:
        """What the tensors are compressed with, and which they are; in the order in which they come."""
        named: dict[Compression, list[tuple[str, tuple[int, ...]]]] = {}
        for place in layout.places:
            named.setdefault(self.for_parameter(place.name, place.shape), []).append((place.name, place.shape))
        return {answer: Layout.of(tensors) for answer, tensors in named.items()}


def _check(rule: object) -> None:
    if not isinstance(rule, tuple) or len(rule) != 2:
        raise ConfigurationError(
            f"ByParameter({rule!r}): a rule is a pair of a pattern and a compression.\n"
            f"Write ByParameter(('*.bias', NoCompression()), ('*', ErrorFeedback(Sign())))."
        )
    pattern, compression = rule
    if not isinstance(pattern, str) or not pattern:
        raise ConfigurationError(
            f"ByParameter(({pattern!r}, ...)): a pattern is text that parameter names are compared with.\n"
            f"Write for instance 'head.weight', 'layers.0.*' or '*'."
        )
    if not isinstance(compression, Compression):
        parentheses = f" Did you mean {compression.__name__}(), with parentheses?" if isinstance(compression, type) else ""
        raise ConfigurationError(
            f"ByParameter(({pattern!r}, {compression!r})): that is not a compression.{parentheses}\n"
            f"Write for instance ({pattern!r}, NoCompression()) or ({pattern!r}, ErrorFeedback(Sign()))."
        )


def _check_momentum(rules: tuple[tuple[str, Compression], ...]) -> None:
    hints = {compression.optimizer_hint: compression for _, compression in rules}
    if len(hints) > 1:
        one, other = list(hints.values())[:2]
        raise ConfigurationError(
            f"ByParameter(...): {one!r} and {other!r} need different optimizers, since one of them brings its own momentum, and "
            f"there is one optimizer.\n"
            f"Use one of them for all parameters, or codecs without momentum: ErrorFeedback(Sign()), Float16(), NoCompression()."
        )
