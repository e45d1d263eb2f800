"""Reading a strategy from text: what repr writes, recipes by name, and nothing that could do harm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import recipes
from stretto.errors import ConfigurationError
from stretto.parsing import parse
from stretto.plain_calls import MAX_CHARACTERS
from stretto.schedule.orders import Buckets, WaitFree
from stretto.strategy import Strategy


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("Strategy()", Strategy()),
        ("  Strategy( schedule = WaitFree() )\n", Strategy(schedule=WaitFree())),
        ("ddp", recipes.ddp()),
        ("ddp()", recipes.ddp()),
        ("ddp(bucket_bytes=512)", recipes.ddp(bucket_bytes=512)),
        ("Strategy(schedule=Buckets(4096, first_bytes=64))", Strategy(schedule=Buckets(4096, 64))),
    ],
)
def test_what_is_understood(text: str, strategy: Strategy) -> None:
    assert parse(text) == strategy


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not an expression"),
        ("Strategy(", "not an expression"),
        ("x = Strategy()", "not an expression"),
        ("Buckets()", "which is not a Strategy"),
        ("3", "which is not a Strategy"),
        ("Strategy", "'Strategy' is not understood"),
        ("horovd()", "'horovd' is not known; known are .*horovod"),
        ("__import__('os').system('true')", "is not understood"),
        ("__import__('os')", "'__import__' is not known"),
        ("Strategy().digest", "is not understood"),
        ("Strategy(schedule=Buckets(bytes=2**30))", r"'2 \*\* 30' is not understood"),
        ("Strategy(schedule=[WaitFree() for _ in (1,)][0])", "is not understood"),
        ("Strategy(schedule=lambda: 0)", "is not understood"),
        ("Strategy(**{})", r"\*\* is not understood"),
        ("Strategy(*())", "is not understood"),
        ("Strategy(f'{1}')", "is not understood"),
        ("Strategy(colour='red')", "Strategy: .*colour"),
        ("Strategy(WaitFree())", "Strategy: .*positional"),
        ("Strategy(schedule=Buckets(bytes=-5))", r"Buckets\(bytes=-5\)"),
        ("Strategy(schedule=-WaitFree())", "is not understood"),
        ("Strategy(schedule=b'x')", "is not understood"),
        ("(" * 50 + "Strategy()" + ",)" * 50, "nested more than"),
        ("-" * 3000 + "1", "cannot read|nested more than"),
        ("(" * 4000, "not an expression|cannot read"),
    ],
)
def test_what_is_not(text: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        parse(text)


def test_long_texts_are_not_read() -> None:
    with pytest.raises(ConfigurationError, match=f"at most {MAX_CHARACTERS} are read"):
        parse("Strategy()" + " " * MAX_CHARACTERS)


def test_something_else_than_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="text"):
        parse(3)  # type: ignore[arg-type]


def test_names_of_ones_own() -> None:
    assert parse("Strategy(schedule=mine(7))", extra={"mine": lambda n: Buckets(n, n)}).schedule == Buckets(7, 7)


@given(st.text(max_size=200))
def test_any_text_is_a_strategy_or_a_configuration_error(text: str) -> None:
    try:
        assert isinstance(parse(text), Strategy)
    except ConfigurationError as error:
        assert str(error)


def test_a_codec_without_parentheses_is_told_so() -> None:
    with pytest.raises(ConfigurationError, match=r"write Int8\(\), with parentheses"):
        parse("Strategy(compress=Int8)")
