"""Random-k: the draw (distinct, even, the same everywhere), the sum of payloads, unbiasedness, contraction, conservation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.kernels import compiling
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_k import RandomK, draw_places, places
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sparse_format import counts_of
from stretto.errors import ConfigurationError, MalformedPayload

DRAW, CPU = RandomKeys.of_round(3, 1), torch.device("cpu")
LARGEST = torch.finfo(torch.float32).max
FIRST_OF_1000 = [263, 312, 101, 637, 945]
SHAPES = [("matrix", (30, 40)), ("bias", (40,)), ("empty", (0, 3)), ("scalar", ()), ("kernel", (8, 4, 3, 3))]


def whole(*sizes: int) -> Blocks:
    return Layout.of([(f"tensor {number}", (size,)) for number, size in enumerate(sizes)]).whole()


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def vectors(n: int) -> dict[str, Tensor]:
    return {
        "gaussian": gaussian(n),
        "sparse": gaussian(n) * (gaussian(n, 1) > 1.0),
        "one-hot": torch.eye(n)[n // 3],
        "constant": torch.full((n,), -0.25),
        "one large": torch.cat([torch.tensor([100.0]), gaussian(n - 1)]),
    }


def sent(codec: RandomK, values: Tensor, blocks: Blocks, draw: RandomKeys) -> Tensor:
    return codec.decode(codec.encode(values, blocks, draw), blocks, draw)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 400), max_size=5), st.sampled_from([0.001, 0.1, 0.5, 1.0]), st.integers(0, 2**32 - 1))
def test_places_are_distinct_and_in_their_block_and_kernels_draw_the_same(sizes: list[int], fraction: float, key: int) -> None:
    blocks, draw = whole(*sizes), RandomKeys(shared=key, own=5)
    counts = counts_of(fraction, blocks)
    drawn = places(blocks, counts, draw, CPU)

    assert torch.equal(drawn, draw_places.reference(blocks, counts, draw, CPU))
    assert len(set(drawn.tolist())) == len(drawn)
    owners = torch.searchsorted(blocks.bounds, drawn, right=True) - 1
    assert torch.equal(owners, torch.repeat_interleave(torch.arange(len(blocks)), counts))


def test_the_draw_is_the_same_on_every_platform() -> None:
    """Numbers that must never change: workers of different versions and machines have to agree."""
    assert draw_places.reference(whole(1000), torch.tensor([5]), RandomKeys(shared=7), CPU).tolist() == FIRST_OF_1000
    assert places(whole(1000), torch.tensor([5]), RandomKeys(shared=7), CPU).tolist() == FIRST_OF_1000


def test_a_large_tensor_is_drawn_the_same_by_both() -> None:
    blocks = whole(3_000_000, 2**31 - 1)
    counts = torch.tensor([3000, 3000])
    assert torch.equal(places(blocks, counts, DRAW, CPU), draw_places.reference(blocks, counts, DRAW, CPU))


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 1), (5, 2), (11, 3), (13, 12), (97, 5), (100, 50)])
def test_every_element_has_the_same_chance(n: int, k: int) -> None:
    """Over 3000 rounds each is chosen 3000 k/n times, within 5 deviations; and neighbours together as often as two should be."""
    rounds = 3000
    blocks, counts = whole(n), torch.tensor([k])
    times, neighbours = torch.zeros(n), torch.zeros(n)
    for number in range(rounds):
        chosen = torch.zeros(n)
        chosen[places(blocks, counts, RandomKeys.of_round(number, 0), CPU)] = 1.0
        times += chosen
        neighbours += chosen * chosen.roll(1)

    assert float(times.sum()) == rounds * k
    deviation = math.sqrt(rounds * k / n * (1 - k / n))
    assert float((times - rounds * k / n).abs().max()) <= 5 * deviation
    if n > 50:  # in small tensors pairs are drawn unevenly, by some percent
        together = k / n * (k - 1) / (n - 1)
        assert float((neighbours - rounds * together).abs().max()) <= 5 * math.sqrt(rounds * together * (1 - together)) + 1


def test_rounds_and_tensors_draw_differently_and_workers_alike() -> None:
    def drawn(blocks: Blocks, number: int, rank: int) -> list[int]:
        return places(blocks, torch.tensor([20]), RandomKeys.of_round(number, rank), CPU).tolist()

    a, b = Layout.of([("a", (1000,))]).whole(), Layout.of([("b", (1000,))]).whole()
    assert drawn(a, 1, 0) == drawn(a, 1, 5)
    assert len(set(drawn(a, 1, 0)) & set(drawn(a, 2, 0))) < 5
    assert len(set(drawn(a, 1, 0)) & set(drawn(b, 1, 0))) < 5


@pytest.mark.parametrize("scaled", [False, True])
def test_values_are_sent_in_order_of_the_draw(scaled: bool) -> None:
    codec, blocks, values = RandomK(0.1, scaled), whole(100, 7), gaussian(107)
    payload = codec.encode(values, blocks, DRAW)

    drawn = draw_places.reference(blocks, torch.tensor([10, 1]), DRAW, CPU)
    factors = torch.tensor([10.0] * 10 + [7.0]) if scaled else torch.ones(11)
    assert len(payload) == codec.num_bytes(blocks) == 4 * 11
    assert torch.equal(payload.view(torch.float32), values[drawn] * factors)
    expected = torch.zeros(107)
    expected[drawn] = values[drawn] * factors
    assert torch.equal(codec.decode(payload, blocks, DRAW), expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_not_said_stays(scaled: bool) -> None:
    codec, blocks = RandomK(0.2, scaled), whole(300)
    for name, values in vectors(300).items():
        rest = values.clone()
        payload = codec.encode_residual(rest, blocks, DRAW)
        said = codec.decode(payload, blocks, DRAW)
        assert torch.equal(payload, codec.encode(values, blocks, DRAW)), name
        assert torch.equal(rest, values - said), name
        total = torch.ones(300)
        codec.add_decoded(payload, blocks, DRAW, total)
        assert torch.equal(total, 1 + said), name


def test_payloads_add_up() -> None:
    codec, blocks, a, b = RandomK(0.1), whole(500, 20), gaussian(520), gaussian(520, 1)
    total = codec.encode(a, blocks, DRAW).view(torch.float32) + codec.encode(b, blocks, DRAW).view(torch.float32)

    torch.testing.assert_close(codec.decode(total.view(torch.uint8), blocks, DRAW), sent(codec, a + b, blocks, DRAW))


def test_scaled_is_unbiased_with_the_promised_variance() -> None:
    codec, n, rounds = RandomK(0.1, scaled=True), 200, 600
    for name, values in vectors(n).items():
        draws = torch.stack([sent(codec, values, whole(n), RandomKeys.of_round(number, 0)) for number in range(rounds)]).double()
        deviation = values.abs() * 3.0 / math.sqrt(rounds)  # sqrt(n/k - 1) |x_i| for one draw
        assert bool(((draws.mean(0) - values).abs() <= 5 * deviation + 1e-6).all()), name
        error = (draws - values).square().sum(1).mean() / values.double().square().sum()
        spread = 24 if name in ("one-hot", "one large") else 6  # one element alone: 81 in one draw of 10, else 1
        assert float(error) == pytest.approx(9.0, abs=5 * spread / math.sqrt(rounds)), name


def test_unscaled_is_a_contraction_in_expectation() -> None:
    codec, n, rounds = RandomK(0.25), 200, 600
    for name, values in vectors(n).items():
        draws = torch.stack([sent(codec, values, whole(n), RandomKeys.of_round(number, 0)) for number in range(rounds)])
        errors = (draws - values).double().square().sum(1) / values.double().square().sum()
        assert float(errors.max()) <= 1.0 + 1e-9, name
        assert float(errors.mean()) == pytest.approx(0.75, abs=5 * math.sqrt(0.25 * 0.75 / rounds)), name


def test_tensors_do_not_depend_on_their_bucket() -> None:
    codec, values = RandomK(0.1, scaled=True), gaussian(1500)
    both = Layout.of([("a", (1000,)), ("b", (500,))]).whole()
    together = sent(codec, values, both, DRAW)

    assert torch.equal(sent(codec, values[:1000], Layout.of([("a", (1000,))]).whole(), DRAW), together[:1000])
    assert torch.equal(sent(codec, values[1000:], Layout.of([("b", (500,))]).whole(), DRAW), together[1000:])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_loses_nothing_and_all_end_alike(size: int) -> None:
    workers = Workers(ErrorFeedback(RandomK(0.1)), SHAPES, size)
    n = workers.layout.num_elements
    given_, said = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for turn in range(20):
        gradients = [gaussian(n, 100 * turn + rank) for rank in range(size)]
        results = workers.round(gradients)
        assert all(torch.equal(result, results[0]) for result in results)
        assert int(results[0].ne(0).sum()) <= int(counts_of(0.1, workers.layout.whole()).sum())
        given_ += torch.stack(gradients).double().mean(0)
        said += results[0].double()

    left = torch.stack([state.own.flat(RESIDUAL) for state in workers.states]).double().mean(0)
    torch.testing.assert_close(said + left, given_, rtol=1e-5, atol=1e-5)


def test_awkward_tensors_stay_finite() -> None:
    for scaled in (False, True):
        for values in (torch.zeros(50), gaussian(50) * 1e-41, gaussian(50).sign() * LARGEST, torch.eye(50)[7]):
            assert bool(sent(RandomK(0.1, scaled), values, whole(50), DRAW).isfinite().all())
    assert sent(RandomK(0.1), torch.tensor([-3.0]), whole(1), DRAW).tolist() == [-3.0]
    assert torch.equal(sent(RandomK(1.0, scaled=True), gaussian(77), whole(77), DRAW), gaussian(77))
    assert len(RandomK(0.1).encode(torch.zeros(0), whole(), DRAW)) == 0
    assert sent(RandomK(0.1), torch.zeros(0), whole(), DRAW).shape == (0,)
    assert len(draw_places.reference(whole(), torch.zeros(0, dtype=torch.int64), DRAW, CPU)) == 0


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=24) | st.binary(min_size=12, max_size=12))
def test_any_bytes_decode_to_finite_values_or_are_refused(content: bytes) -> None:
    codec, blocks = RandomK(0.1), whole(20, 3)
    payload = torch.tensor(list(content), dtype=torch.uint8)
    finite = len(content) == 12 and bool(payload.view(torch.float32).isfinite().all())

    if finite:
        assert bool(codec.decode(payload, blocks, DRAW).isfinite().all())
    else:
        with pytest.raises(MalformedPayload):
            codec.decode(payload, blocks, DRAW)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    payload = torch.tensor([1.0, value, 2.0]).view(torch.uint8)
    with pytest.raises(MalformedPayload):
        RandomK(0.1).decode(payload, whole(20, 3), DRAW)


def test_without_numba_everything_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, blocks, values = RandomK(0.05, scaled=True), whole(700, 30, 1), gaussian(731)

    def everything() -> list[Tensor]:
        rest, total = values.clone(), torch.ones(731)
        payload = codec.encode_residual(rest, blocks, DRAW)
        codec.add_decoded(payload, blocks, DRAW, total)
        return [codec.encode(values, blocks, DRAW), payload, rest, total, codec.decode(payload, blocks, DRAW)]

    fast = everything()
    monkeypatch.setattr(compiling, "has_numba", lambda: False)
    assert all(torch.equal(a, b) for a, b in zip(fast, everything(), strict=True))


def test_it_prints_as_it_is_written() -> None:
    assert eval(repr(ErrorFeedback(RandomK(0.01)))) == ErrorFeedback(RandomK(0.01))
    assert eval(repr(RandomK(0.01, scaled=True))) == RandomK(0.01, scaled=True)


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, math.nan, math.inf, True, "0.1", None])
def test_a_fraction_that_is_none_is_refused(fraction: object) -> None:
    with pytest.raises(ConfigurationError, match=r"Write RandomK\(0.01\)"):
        RandomK(fraction)  # type: ignore[arg-type]


@pytest.mark.parametrize("scaled", [1, None, "yes"])
def test_scaled_is_true_or_false(scaled: object) -> None:
    with pytest.raises(ConfigurationError, match="scaled=True"):
        RandomK(0.1, scaled)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("scaled", [False, True])
def test_a_gpu_draws_and_sends_the_same(scaled: bool) -> None:
    codec, blocks, values = RandomK(0.1, scaled), whole(7000, 30, 1), gaussian(7031)
    payload = codec.encode(values.cuda(), blocks, DRAW)

    assert torch.equal(payload.cpu(), codec.encode(values, blocks, DRAW))
    assert torch.equal(codec.decode(payload, blocks, DRAW).cpu(), codec.decode(payload.cpu(), blocks, DRAW))
