"""What may be asked of a benchmark."""

from __future__ import annotations

import pytest

from stretto.bench.settings import Settings, check, parse_algorithms, parse_sizes, show_size
from stretto.collectives.catalogue import names
from stretto.collectives.plan import Kind
from stretto.errors import ConfigurationError


def test_sizes_are_bytes_with_binary_units() -> None:
    assert parse_sizes("4K, 1M,32MB,100") == [4096, 1 << 20, 32 << 20, 100]
    assert [show_size(size) for size in (100, 4096, 32 << 20, 3 << 29)] == ["100 B", "4 KB", "32 MB", "1.5 GB"]


@pytest.mark.parametrize("text", ["", "5", "0", "-4K", "4X", "1.5M", "4K,,1M"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="4K,1M,32M"):
        parse_sizes(text)


def test_algorithms_are_those_of_the_catalogue_by_any_name_and_once_each() -> None:
    assert parse_algorithms("all") == ["auto", *names(Kind.ALL_REDUCE)]
    assert parse_algorithms("auto, rabenseifner,ring,halving_doubling") == ["auto", "halving_doubling", "ring"]
    with pytest.raises(ConfigurationError, match="no such algorithm"):
        parse_algorithms("auto,rings")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"workers": 1}, "moves nothing"),
        ({"repeat": 0}, "at least 1"),
        ({"rate": "1gbit"}, "--hosts"),
        ({"busy": True, "device": "cuda"}, "Leave one of the two out"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check(Settings(sizes=[4096], algorithms=["auto"], **changed))  # type: ignore[arg-type]


def test_busy_adds_two_loads_and_both_wires_are_two() -> None:
    settings = check(Settings(sizes=[4096], algorithms=["auto"], busy=True))

    assert settings.loads == ["idle", "python", "torch"] and settings.wires == ["plain", "encrypted"]
