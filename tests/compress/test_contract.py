"""Layout, draws, state and exchanges: what every codec stands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.layout import Blocks, Layout
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.qsgd import QSGD
from stretto.compress.random_numbers import RandomKeys, mix, mix_tensor
from stretto.compress.rounds import ExchangeContext, Gather, share_out
from stretto.compress.sign import Sign
from stretto.compress.state import SERVER, CompressionState
from stretto.compress.tern_grad import TernGrad
from stretto.compress.threshold import Threshold
from stretto.compress.top_k import TopK
from stretto.compress.warm_up import WarmUp
from stretto.errors import ConfigurationError, FrameError

CPU = torch.device("cpu")
SHAPES = [("a", (3, 7)), ("b", ()), ("empty", (0, 4)), ("c", (50,)), ("d", (9, 4))]
SIZES = st.lists(st.integers(0, 40), max_size=6)


def _random(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


# -- layout -----------------------------------------------------------------------------------------------------------


@given(SIZES, st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_blocks_cover_every_tensor_from_its_beginning_without_gaps(sizes: list[int], length: int) -> None:
    layout = Layout.of((str(number), (size,)) for number, size in enumerate(sizes))
    blocks = layout.cut(lambda place: length)
    assert blocks.bounds[0] == 0 and blocks.num_elements == layout.num_elements == sum(sizes)
    assert len(blocks) == sum(-(-size // length) for size in sizes)
    assert all(1 <= one <= length for one in blocks.lengths.tolist())
    assert {place.start for place in layout.places if place.size} <= set(blocks.bounds.tolist())
    assert blocks.numbers().tolist() == [b for b, n in enumerate(blocks.lengths.tolist()) for _ in range(n)]


@given(SIZES, st.integers(1, 20), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_whole_blocks_are_shared_out_in_order_and_evenly(sizes: list[int], length: int, workers: int) -> None:
    blocks = Layout.of((str(number), (size,)) for number, size in enumerate(sizes)).cut(lambda place: length)
    shares = share_out(blocks, workers)
    assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]
    assert shares[0].start == 0 and shares[-1].stop == blocks.num_elements
    assert sum(len(share.blocks) for share in shares) == len(blocks)
    assert max(share.stop - share.start for share in shares) <= blocks.num_elements / workers + 2 * length


def test_keys_say_which_part_of_which_tensor_a_block_is_wherever_it_lies() -> None:
    together = Layout.of([("x", (10,)), ("y", (10,))]).cut(lambda place: 4)
    alone = Layout.of([("y", (10,))]).cut(lambda place: 4)
    assert together.keys[3:].tolist() == alone.keys.tolist()
    assert len(set(together.keys.tolist())) == 6


# -- draws ------------------------------------------------------------------------------------------------------------


def test_draws_are_uniform_and_independent_of_buckets() -> None:
    blocks = Layout.of([("x", (100_000,)), ("y", (50_000,))]).cut(lambda place: 4096)
    draw = RandomKeys.of_round(3, rank=1)
    uniform = draw.uniform(blocks, draw.own)
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    counts = torch.histc(uniform, 20, 0, 1) / len(uniform)
    assert float((counts - 0.05).abs().max()) < 5 * (0.05 * 0.95 / len(uniform)) ** 0.5
    assert abs(float(torch.corrcoef(torch.stack([uniform[:-1], uniform[1:]]))[0, 1])) < 0.015
    alone = Layout.of([("y", (50_000,))]).cut(lambda place: 4096)
    assert torch.equal(uniform[100_000:], draw.uniform(alone, draw.own))


def test_rounds_and_ranks_draw_differently_and_share_what_is_shared() -> None:
    draws = [[RandomKeys.of_round(number, rank) for rank in range(4)] for number in range(50)]
    assert all(len({draw.shared for draw in ranks}) == 1 for ranks in draws)
    assert len({draw.own for ranks in draws for draw in ranks}) == 200
    assert draws[0][0].again() == draws[0][3].again() != draws[1][0].again()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_the_hash_is_the_same_for_numbers_and_tensors(x: int) -> None:
    assert mix(x) == int(mix_tensor(torch.tensor([x]))[0])


# -- state ------------------------------------------------------------------------------------------------------------


def test_a_proposal_becomes_the_state_or_leaves_no_trace() -> None:
    state = CompressionState(Layout.of(SHAPES), CPU)
    state.own.next_flat("residual").fill_(1.0)
    state.shared.set_next("q", "a", torch.ones(2))
    state.discard()
    assert not state.own.flat("residual").any() and state.shared.get("q", "a") is None and state.rounds == 0
    state.own.next_flat("residual").fill_(2.0)
    state.shared.set_next("q", "a", torch.ones(2))
    state.commit()
    assert bool((state.own.flat("residual") == 2.0).all()) and state.shared.get("q", "a") is not None and state.rounds == 1


def test_state_moves_by_name_into_other_buckets() -> None:
    one = CompressionState(Layout.of(SHAPES), CPU)
    one.own.next_flat("residual").copy_(torch.arange(one.layout.num_elements))
    one.shared.set_next("q", "c", torch.ones(5))
    one.commit()
    other = CompressionState(Layout.of(reversed(SHAPES)), CPU)
    other.own.restore(one.own.export(), frozenset(("residual",)))
    other.shared.restore(one.shared.export(), frozenset())
    exported = other.own.export()
    assert all(torch.equal(one.own.export()[name]["residual"], exported[name]["residual"]) for name, _ in SHAPES)
    assert torch.equal(other.shared.export()["c"]["q"], torch.ones(5))


def test_a_vector_of_which_a_part_is_kept_exports_zeros_for_the_rest() -> None:
    state = CompressionState(Layout.of(SHAPES), CPU)
    state.own.flat(SERVER, 10, 40)
    state.own.next_flat(SERVER).fill_(3.0)
    state.commit()
    whole = torch.cat([state.own.export()[name][SERVER].flatten() for name, _ in SHAPES])
    assert whole.nonzero().flatten().tolist() == list(range(10, 40))


def test_an_absent_worker_keeps_its_own_and_what_it_combines_goes_on() -> None:
    state = CompressionState(Layout.of(SHAPES), CPU)
    state.own.next_flat("residual").fill_(1.0)
    state.own.flat(SERVER, 0, 5)
    state.commit()
    absent = state.of_absent()
    assert not absent.own.flat("residual").any()
    absent.own.next_flat("residual").fill_(7.0)
    absent.own.next_flat(SERVER).fill_(5.0)
    absent.shared.set_next("q", "a", torch.ones(1))
    absent.commit()
    assert bool((state.own.flat("residual") == 1.0).all()) and bool((state.own.flat(SERVER) == 5.0).all())
    assert state.shared.get("q", "a") is not None


# -- exchanges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("codec", [Float16(), Int8(16), TopK(1.0), Threshold(1e-30), NoCompression()], ids=repr)
def test_what_loses_little_gives_the_mean(codec: Any, size: int) -> None:
    workers = Workers(codec, SHAPES, size)
    grads = [_random(workers.layout.num_elements, rank) for rank in range(size)]
    for found in workers.round(grads):
        assert torch.allclose(found, torch.stack(grads).mean(0), atol=0.03)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("codec", [Int8(16), Sign(16), TopK(0.2)], ids=repr)
def test_bytes_sent_are_as_the_formula_says(codec: Any, size: int) -> None:
    workers = Workers(codec, SHAPES, size)
    workers.round([torch.ones(workers.layout.num_elements)] * size)
    assert workers.bytes_sent == [codec.bytes_sent(workers.layout, rank, size) for rank in range(size)]


def test_one_worker_loses_as_much_by_ring_as_otherwise() -> None:
    """Alone there is no hop to encode at; the values are encoded all the same."""
    values = _random(88, 1)
    for algorithm in ("auto", "ring"):
        workers = Workers(Int8(16), [("x", (88,))], 1, algorithm)
        (found,) = workers.round([values])
        assert not torch.equal(found, values) and torch.allclose(found, values, atol=0.02)


def test_a_length_that_cannot_be_is_refused_before_memory_is_taken() -> None:
    codec, layout = Threshold(0.5), Layout.of([("x", (10,))])
    steps = codec.exchange(torch.ones(10), ExchangeContext(layout, CompressionState(layout, CPU), rank=0, world_size=2))
    assert isinstance(next(steps), Gather)
    with pytest.raises(FrameError, match="rank 1 .* announces 1099511627776 bytes where at most 84 can come"):
        steps.send(torch.tensor([[84], [2**40]]))


def test_error_feedback_refuses_what_has_nothing_to_feed_back() -> None:
    wrong: list[Any] = [
        NoCompression(), ErrorFeedback(Sign()), Sign(vote=True), OneBitAdam(3), EF21(TopK(0.1)), Sign, 3, WarmUp(3, Sign()),
    ]  # fmt: skip
    for codec in wrong:
        with pytest.raises(ConfigurationError, match=r"(?s)ErrorFeedback\(.*Write it around a lossy codec"):
            ErrorFeedback(codec)


@pytest.mark.parametrize("codec", [Int8(stochastic=True), Int8(block=4096, stochastic=True), BFloat16(stochastic=True)], ids=repr)
def test_rounding_at_random_to_many_levels_is_a_contraction_and_may_be_fed_back(codec: Any) -> None:
    """Also for the worst of vectors: one value of 1, and the others where they err most for their size."""
    assert ErrorFeedback(codec).codec == codec
    a = 4095 / 127**2
    values = torch.full((4096,), ((1 + a) ** 0.5 - 1) / a / 127)
    values[::256] = 1.0
    layout = Layout.of([("x", (4096,))])
    blocks, errors = codec.blocks(layout), []
    for number in range(20):
        draw = RandomKeys.of_round(number, 0)
        errors.append((codec.decode(codec.encode(values, blocks, draw), blocks, draw) - values).double().square().sum())
    assert 0 < float(torch.stack(errors).mean() / values.double().square().sum()) < 0.3


def test_what_may_grow_without_bound_is_refused_wherever_it_would_be_fed_back() -> None:
    assert ErrorFeedback(Int8(64515, stochastic=True)) and ErrorFeedback(Int8(10**6))
    for codec in (TernGrad(), QSGD(4), Int8(64516, stochastic=True)):
        assert codec.no_contraction is not None and codec.no_residual is None
        for around in (ErrorFeedback, EF21, lambda codec: WarmUp(3, ErrorFeedback(codec))):
            with pytest.raises(ConfigurationError, match=rf"(?s)what is left over .*rite {type(codec).__name__}\(.*alone"):
                around(codec)


def test_without_error_feedback_nothing_is_kept_of_the_means_either() -> None:
    for codec in (TernGrad(), QSGD(4)):
        workers = Workers(codec, SHAPES, 3)
        workers.round([_random(workers.layout.num_elements, rank) for rank in range(3)])
        assert workers.bytes_sent[0] > 0 and not any(kinds for kinds in workers.states[0].own.export().values())


# -- warm-up ----------------------------------------------------------------------------------------------------------


def test_a_warm_up_is_exact_and_then_it_is_not() -> None:
    workers = Workers(WarmUp(2, ErrorFeedback(TopK(0.1))), SHAPES, 3)
    for number in range(4):
        grads = [
            torch.randn(workers.layout.num_elements, generator=torch.Generator().manual_seed(9 * number + r)) for r in range(3)
        ]
        exact = torch.allclose(workers.round(grads)[0], torch.stack(grads).mean(0), atol=1e-6)
        assert exact == (number < 2)
    assert bool(workers.states[0].own.flat(RESIDUAL).any())


@pytest.mark.parametrize("stop", range(6))
def test_a_warm_up_is_resumed_in_any_round(stop: int) -> None:
    """Around the round in which it changes over: what comes afterwards has the bits of a run that was not stopped."""
    runs = [Workers(WarmUp(2, ErrorFeedback(Sign())), SHAPES, 3) for _ in range(2)]
    for number in range(6):
        grads = [_random(runs[0].layout.num_elements, 9 * number + rank) for rank in range(3)]
        if number == stop:
            for rank, old in enumerate(runs[1].states):
                new = CompressionState(runs[1].layout, CPU)
                new.rounds = old.rounds
                runs[1].compression.restore(new, old.own.export(), old.shared.export(), rank, 3)
                runs[1].states[rank] = new
        assert all(torch.equal(*results) for results in zip(*(run.round(grads) for run in runs), strict=True))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_warm_up_gives_what_was_remembered_to_the_compression_of_the_next_round(rounds: int) -> None:
    state = CompressionState(Layout.of(SHAPES), CPU)
    state.rounds = rounds
    WarmUp(2, ErrorFeedback(Sign())).restore(state, {"a": {RESIDUAL: torch.ones(3, 7)}}, {}, 0, 1)
    assert bool(state.own.flat(RESIDUAL).any()) == (rounds >= 2)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((-1, Sign()), "0 or more"),
        ((True, Sign()), "whole number"),
        ((1.5, Sign()), "whole number"),
        ((3, Sign), "not a compression"),
        ((3, OneBitAdam(5)), "no optimizer suits both"),
        ((3, Sign(vote=True)), "no optimizer suits both"),
        ((3, ErrorFeedback(Sign()), ErrorFeedback(Sign(64))), "would be lost"),
    ],
)
def test_a_warm_up_refuses_what_cannot_be(arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        WarmUp(*arguments)


def test_a_warm_up_asks_for_each_parameter() -> None:
    warm = WarmUp(3, ErrorFeedback(PowerSGD(2)))
    assert warm.for_parameter("bias", (40,)) == NoCompression()
    assert warm.for_parameter("weight", (40, 40)) == warm


def test_blocks_may_be_none() -> None:
    blocks = Blocks(torch.tensor([0]), torch.zeros(0, dtype=torch.int64))
    assert len(blocks) == 0 and blocks.num_elements == 0 and blocks.split(3) == [(0, 0)] * 3
