"""What one run of `stretto bench compress` is asked to do, checked once."""

from __future__ import annotations

import ast

import msgspec

from stretto.bench.settings import DeviceChoice
from stretto.compress.codec import Compression
from stretto.errors import ConfigurationError
from stretto.parsing import parse
from stretto.plain_calls import MAX_CHARACTERS

DEFAULT_CODECS = (
    "Float16()", "BFloat16()", "Int8()", "Dynamic8()", "E3M0()", "QSGD(4)", "TernGrad()", "OneBit()", "Sign()",
    "TopK(0.01)", "RandomK(0.01)", "Threshold(2.5)", "PowerSGD(4)", "DGC(0.001)", "DeMo()", "OneBitAdam(1000)",
    "EF21(TopK(0.01))", "ErrorFeedback(Sign())", "ErrorFeedback(TopK(0.01))", "ErrorFeedback(PowerSGD(4))",
)  # fmt: skip
MAX_WORKERS = 64  # all of them, with their memories, are in this process


class CompressSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`sizes`: bytes of float32 values. `codecs`: as a strategy would name them. `rates`: links to judge for, in Mbit/s.
    `limit_s`: for one codec and size; where `rounds` would take longer there are fewer, at least one."""

    sizes: list[int]
    codecs: list[str]
    device: DeviceChoice = "cpu"
    workers: int = 4
    rounds: int = 11
    limit_s: float = 60.0
    rates: tuple[float, ...] = (100.0, 1000.0, 10000.0)
    command: str = ""


def check(settings: CompressSettings) -> CompressSettings:
    """The same settings, if they can work."""
    if not 2 <= settings.workers <= MAX_WORKERS:
        raise ConfigurationError(
            f"--workers {settings.workers}: an exchange is between 2 workers or more, and here at most {MAX_WORKERS}, for all of "
            f"them are in this process. Write for instance --workers 4."
        )
    if settings.rounds < 1:
        raise ConfigurationError(
            f"--rounds {settings.rounds}: there would be nothing to report. Write at least 1; 7 or more for a fair median."
        )
    if not 0 < settings.limit_s < float("inf"):
        raise ConfigurationError(
            f"--limit {settings.limit_s:g}: the seconds for one codec and size are a number above 0. Write --limit 60."
        )
    return settings


def parse_codecs(text: str) -> list[str]:
    """`Int8(), ErrorFeedback(Sign())` as a list of texts, each of which `compression_of` reads; `all` is the default list."""
    if text.strip() == "all":
        return list(DEFAULT_CODECS)
    if len(text) > MAX_CHARACTERS:
        raise ConfigurationError(f"--codecs of {len(text)} characters: at most {MAX_CHARACTERS} are read.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as problem:
        raise ConfigurationError(
            f"--codecs {text!r}: that is not a list of codecs ({problem}).\n"
            f'Write for instance --codecs "Int8(), ErrorFeedback(Sign())", in quotes, or --codecs all.'
        ) from None
    words = [ast.unparse(item) for item in (tree.elts if isinstance(tree, ast.Tuple) else [tree])]
    for word in words:
        compression_of(word)
    return list(dict.fromkeys(words))


def compression_of(word: str) -> Compression:
    """Read one, with the whitelist of strategies."""
    try:
        return parse(f"Strategy(compress={word})").compress
    except ConfigurationError as problem:
        raise ConfigurationError(f"--codecs {word}: {problem}") from None


def parse_rates(text: str) -> tuple[float, ...]:
    """Mbit/s from `100,1000`."""
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigurationError(
            f"--rates {text}: link speeds are numbers of Mbit/s, with commas. Write for instance --rates 100,1000,10000."
        )
    return rates
