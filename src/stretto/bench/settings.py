"""What one benchmark run is asked to do: checked once, then sent to the workers as JSON."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from stretto.collectives import catalogue
from stretto.collectives.plan import Kind
from stretto.errors import ConfigurationError

WireChoice = Literal["plain", "encrypted", "both"]
DeviceChoice = Literal["cpu", "cuda"]
PeerChoice = Literal["gloo", "none"]
Load = Literal["idle", "python", "torch"]  # what the main thread does while a collective runs

ELEMENT_BYTES = 4  # float32
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `workers` is the world size; `lab` says whether they are lab hosts (with links of `rate`)."""

    sizes: list[int]
    algorithms: list[str]
    wire: WireChoice = "both"
    device: DeviceChoice = "cpu"
    peer: PeerChoice = "gloo"
    busy: bool = False
    repeat: int = 11
    warm_up: int = 2
    workers: int = 4
    lab: bool = False
    rate: str | None = None
    command: str = ""

    @property
    def wires(self) -> list[str]:
        return ["plain", "encrypted"] if self.wire == "both" else [self.wire]

    @property
    def loads(self) -> list[Load]:
        return ["idle", "python", "torch"] if self.busy else ["idle"]


def check(settings: Settings) -> Settings:
    """The same settings, if they can work."""
    if settings.workers < 2:
        raise ConfigurationError(
            f"a benchmark with {settings.workers} worker(s): an all-reduce of one worker moves nothing. "
            f"Write -n 2 or --hosts 2, or more."
        )
    if settings.repeat < 1:
        raise ConfigurationError(
            f"--repeat {settings.repeat}: there would be nothing to report. Write at least 1; 7 or more for a fair median."
        )
    if settings.rate is not None and not settings.lab:
        raise ConfigurationError(
            f"--rate {settings.rate} without --hosts: only links between lab hosts can be shaped. "
            f"Write for instance --hosts 4 --rate {settings.rate}."
        )
    if settings.busy and settings.device == "cuda":
        raise ConfigurationError(
            "--busy with --device cuda: what --busy shows is the price of the host's interpreter lock, "
            "and copies from and to the GPU would hide it. Leave one of the two out."
        )
    return settings


def parse_sizes(text: str) -> list[int]:
    """Bytes from `4K,1M,32M`; K, M and G are powers of 1024."""
    return [_parse_size(word.strip()) for word in text.split(",")]


def _parse_size(word: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)B?", word.upper())
    num_bytes = int(found[1]) * UNITS[found[2]] if found else 0
    if num_bytes < ELEMENT_BYTES or num_bytes % ELEMENT_BYTES:
        raise ConfigurationError(
            f"--sizes {word}: a size is a number of bytes that float32 numbers fill, with K, M or G for powers of 1024. "
            f"Write for instance --sizes 4K,1M,32M."
        )
    return num_bytes


def parse_algorithms(text: str) -> list[str]:
    """`auto,ring` or `all`, which is auto and the whole catalogue."""
    if text.strip() == "all":
        return ["auto", *catalogue.names(Kind.ALL_REDUCE)]
    words = [word.strip() for word in text.split(",")]
    found = [word if word == "auto" else catalogue.find(Kind.ALL_REDUCE, word).name for word in words]
    return list(dict.fromkeys(found))


def show_size(num_bytes: float) -> str:
    """4096 -> `4 KB`, as the field writes it (powers of 1024)."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes:.4g} B"
