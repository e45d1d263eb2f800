"""ByParameter: the first pattern decides; what it refuses; what it counts."""

from __future__ import annotations

import pickle

import pytest
import torch

from compress.together import Workers
from stretto.compress.by_parameter import ByParameter
from stretto.compress.codec import Compression
from stretto.compress.demo import DeMo
from stretto.compress.dgc import DGC
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.threshold import Threshold
from stretto.compress.top_k import TopK
from stretto.errors import ConfigurationError

CHOICE = ByParameter(("*.bias", NoCompression()), ("head.*", Float16()), ("layers.[01].*", ErrorFeedback(TopK(0.1))))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("head.bias", NoCompression()),
        ("head.weight", Float16()),
        ("layers.0.attention.weight", ErrorFeedback(TopK(0.1))),
        ("layers.2.attention.weight", NoCompression()),
        ("Head.weight", NoCompression()),  # patterns are case-sensitive
        ("my.head.weight", NoCompression()),  # and match the whole name
    ],
)
def test_the_first_pattern_that_matches_decides(name: str, expected: Compression) -> None:
    assert CHOICE.for_parameter(name, (4, 4)) == expected


def test_the_choice_may_choose_further() -> None:
    """PowerSGD does not compress vectors; two choices one inside the other."""
    choice = ByParameter(("a.*", ErrorFeedback(PowerSGD(2))), ("*", ByParameter(("b.*", Float16()))))
    assert choice.for_parameter("a.bias", (64,)) == ErrorFeedback(PowerSGD(2)).for_parameter("a.bias", (64,))
    assert not isinstance(choice.for_parameter("a.bias", (64,)), ErrorFeedback)
    assert isinstance(choice.for_parameter("a.weight", (640, 640)), ErrorFeedback)
    assert choice.for_parameter("b.bias", (64,)) == Float16()
    assert choice.for_parameter("c.bias", (64,)) == NoCompression()


def test_repr_reads_back() -> None:
    assert repr(CHOICE) == (
        "ByParameter(('*.bias', NoCompression()), ('head.*', Float16()), "
        "('layers.[01].*', ErrorFeedback(codec=TopK(fraction=0.1))))"
    )
    assert eval(repr(CHOICE)) == CHOICE
    assert hash(eval(repr(CHOICE))) == hash(CHOICE)
    assert pickle.loads(pickle.dumps(CHOICE)) == CHOICE
    assert ByParameter(("*", Float16())) != ByParameter(("?", Float16()))


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        CHOICE.rules = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ((), "no rules"),
        (("*", Float16()), "pair"),  # forgot the inner parentheses
        ((("*", Float16(), 3),), "pair"),
        ((["*", Float16()],), "pair"),
        (((b"*", Float16()),), "pattern is text"),
        ((("", Float16()),), "pattern is text"),
        ((("*", Float16),), r"Did you mean Float16\(\)"),
        ((("*", "Float16()"),), "not a compression"),
    ],
)
def test_rules_that_cannot_work(rules: tuple[object, ...], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        ByParameter(*rules)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [NoCompression(), ErrorFeedback(TopK(0.1)), OneBitAdam(10), DGC()], ids=repr)
def test_one_optimizer_for_all(other: Compression) -> None:
    for rules in ([("*.bias", other), ("*", DeMo())], [("*.weight", DeMo()), ("*", other)]):
        with pytest.raises(ConfigurationError, match="different optimizers"):
            ByParameter(*rules)


def test_those_with_momentum_leave_nobody_out() -> None:
    choice = ByParameter(("*.weight", DeMo(k=4)), ("*.bias", DeMo(k=32)))
    assert choice.optimizer_hint == DeMo.optimizer_hint
    assert choice.for_parameter("a.bias", (3,)) == DeMo(k=32)
    with pytest.raises(ConfigurationError, match=r"'scale'.*\n.*\('\*', DeMo\(k=32"):
        choice.for_parameter("scale", (3,))


def test_what_it_says_of_itself_is_what_its_rules_say() -> None:
    assert CHOICE.optimizer_hint is None
    assert not CHOICE.lossless and ByParameter(("*", NoCompression())).lossless
    assert CHOICE.flat_kinds == ErrorFeedback.flat_kinds
    assert CHOICE.refusal("ring") == ErrorFeedback(TopK(0.1)).refusal("ring")
    assert ByParameter(("*", Float16())).refusal("ring") is None


def test_bytes_are_the_sum_over_the_answers() -> None:
    named = [("head.weight", (7, 9)), ("layers.0.weight", (30,)), ("head.bias", (7,)), ("layers.1.weight", (50,))]
    expected = (
        (NoCompression().bytes_sent(Layout.of(named[2:3]), 1, 3))
        + (Float16().bytes_sent(Layout.of(named[:1]), 1, 3) or 0)
        + (TopK(0.1).bytes_sent(Layout.of([named[1], named[3]]), 1, 3) or 0)
    )
    assert CHOICE.bytes_sent(Layout.of(named), 1, 3) == expected > 0
    assert ByParameter(("a", Threshold(1.0))).bytes_sent(Layout.of([("a", (3,)), ("b", (3,))]), 1, 3) is None


def test_a_bucket_with_one_answer_is_exchanged_and_restored_by_it() -> None:
    answer = EF21(TopK(0.1))
    choice, plain = (Workers(one, [("w", (50,)), ("v", (20,))], 3) for one in (ByParameter(("?", answer)), answer))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        grads = [torch.randn(70, generator=generator) for _ in range(3)]
        assert torch.equal(choice.round(grads)[0], plain.round(grads)[0])
    other = Workers(choice.compression, [("w", (50,)), ("v", (20,))], 3)
    for rank, (old, new) in enumerate(zip(choice.states, other.states, strict=True)):
        other.compression.restore(new, old.own.export(), old.shared.export(), rank, 3)
        new.rounds = old.rounds
    assert torch.equal(other.round(grads)[0], plain.round(grads)[0])


def test_a_bucket_with_several_answers_is_refused() -> None:
    workers = Workers(CHOICE, [("head.weight", (5,)), ("head.bias", (5,))], 2)
    with pytest.raises(ConfigurationError, match="compressed differently"):
        workers.round([torch.ones(10), torch.ones(10)])
