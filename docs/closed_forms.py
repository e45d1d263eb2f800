"""The formulas of the literature for what a collective costs: `docs/collectives.md` prints them, and `tests/plan` compares them
with the costs that `stretto.plan.costs` counts from plans. The letters are explained there, and where a formula is not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, log2, sqrt
from types import MappingProxyType

from stretto.collectives.binomial import depth
from stretto.collectives.catalogue import find
from stretto.collectives.plan import Kind
from stretto.collectives.torus import nearly_square
from stretto.errors import ConfigurationError
from stretto.plan.costs import LinkCosts

# ---------------------------------------------------------------- segments


def segmented(depth: int, num_segments: int, num_bytes: float, link: LinkCosts) -> float:
    """(h+k-1)(alpha + (m/k) beta): a chain or tree of depth h that moves m bytes one way in k segments."""
    return (depth + num_segments - 1) * (link.alpha + num_bytes / num_segments * link.beta)


def segmented_there_and_back(depth: int, num_segments: int, num_bytes: float, link: LinkCosts) -> float:
    """(2h+k-1)(alpha + (m/k)(beta + gamma)): a segment goes back as soon as it is summed."""
    return (2 * depth + num_segments - 1) * (link.alpha + num_bytes / num_segments * (link.beta + link.gamma))


def best_segments(depth: int, num_bytes: float, link: LinkCosts, *, least_bytes: float = 1.0) -> int:
    """The k that makes `segmented` least: sqrt((h-1) m beta / alpha) rounded, segments of `least_bytes` or more."""
    most = max(1, floor(num_bytes / least_bytes))
    if link.alpha == 0:
        return most if depth > 1 else 1
    ideal = sqrt((depth - 1) * num_bytes * link.beta / link.alpha)
    near = {min(most, max(1, candidate)) for candidate in (floor(ideal), ceil(ideal))}
    return min(sorted(near), key=lambda k: segmented(depth, k, num_bytes, link))


def best_segmented(depth: int, num_bytes: float, link: LinkCosts) -> float:
    """(sqrt((h-1) alpha) + sqrt(m beta))^2: `segmented` at its best k, were k a real number."""
    return (sqrt((depth - 1) * link.alpha) + sqrt(num_bytes * link.beta)) ** 2


# ---------------------------------------------------------------- closed formulas


@dataclass(frozen=True, slots=True)
class Formula:
    """As printed and as computed. P ranks, m bytes; h = ceil(log2 P); p = 2^l, the largest power of two up to P."""

    text: str
    seconds: Callable[[int, float, LinkCosts], float]


def _whole(rounds: Callable[[int], int], additions: Callable[[int], int]) -> Callable[[int, float, LinkCosts], float]:
    """So many rounds and additions of the whole vector."""
    return lambda P, m, link: rounds(P) * (link.alpha + m * link.beta) + additions(P) * m * link.gamma


def _chunked(rounds: Callable[[int], int], trips: int, sums: int) -> Callable[[int, float, LinkCosts], float]:
    """So many rounds, in which the vector but for one chunk of P travels `trips` times and is added `sums` times."""
    return lambda P, m, link: rounds(P) * link.alpha + trips * m * (P - 1) / P * link.beta + sums * m * (P - 1) / P * link.gamma


def _butterfly(P: int, m: float, link: LinkCosts) -> float:
    levels, fold = P.bit_length() - 1, _fold(P, m, link)
    return levels * (link.alpha + m * link.beta + m * link.gamma) + fold


def _halving_doubling(P: int, m: float, link: LinkCosts) -> float:
    levels = P.bit_length() - 1
    p = 1 << levels
    volume = m * (p - 1) / p
    return 2 * levels * link.alpha + 2 * volume * link.beta + volume * link.gamma + _fold(P, m, link)


def _fold(P: int, m: float, link: LinkCosts) -> float:
    return 0.0 if P & (P - 1) == 0 else 2 * link.alpha + 2 * m * link.beta + m * link.gamma


def _bidirectional_ring(P: int, m: float, link: LinkCosts) -> float:
    side_by_side = link.lanes > 1
    messages, trips = (2 * (P - 1), 1) if side_by_side else (4 * (P - 1), 2)
    return messages * link.alpha + trips * m * (P - 1) / P * link.beta + m * (P - 1) / P * link.gamma


def _double_binary_tree(P: int, m: float, link: LinkCosts) -> float:
    latency, volume = 2 * depth(P) * link.alpha, m * link.beta if P > 1 else 0.0
    return 2 * (latency + volume + 2 * sqrt(latency * volume))


def _all_to_all(P: int, m: float, link: LinkCosts) -> float:
    return ceil((P - 1) / link.lanes) * (link.alpha + m * link.beta) + (P - 1) * m * link.gamma


def _hierarchical(P: int, m: float, link: LinkCosts, group: int) -> float:
    k = min(group, P)
    hosts = -(-P // k)
    if P % k == 0:
        return _chunked(lambda _: 2 * (k + hosts - 2), 2, 1)(P, m, link)
    inside = _whole(lambda k: 2 * depth(k), depth)(k, m, link)
    return inside + _chunked(lambda hosts: 2 * (hosts - 1), 2, 1)(hosts, m, link)


def _no_wait(P: int) -> int:
    return P - 1


def _there_and_back(P: int) -> int:
    return 2 * (P - 1)


FORMULAS: Mapping[tuple[Kind, str], Formula] = MappingProxyType(
    {
        (Kind.ALL_REDUCE, "all_to_all"): Formula("(P-1)(α + mβ) + (P-1)mγ", _all_to_all),
        (Kind.ALL_REDUCE, "round_robin"): Formula("(P-1)(α + mβ) + (P-1)mγ", _whole(_no_wait, _no_wait)),
        (Kind.ALL_REDUCE, "master_worker"): Formula("2(P-1)(α + mβ) + (P-1)mγ", _whole(_there_and_back, _no_wait)),
        (Kind.ALL_REDUCE, "chain"): Formula("2(P-1)(α + mβ) + (P-1)mγ", _whole(_there_and_back, _no_wait)),
        (Kind.ALL_REDUCE, "binomial_tree"): Formula("2h(α + mβ) + hmγ", _whole(lambda P: 2 * depth(P), depth)),
        (Kind.ALL_REDUCE, "butterfly"): Formula("l(α + mβ + mγ); P ≠ p: + 2α + 2mβ + mγ", _butterfly),
        (Kind.ALL_REDUCE, "halving_doubling"): Formula(
            "2lα + 2m(p-1)/p·β + m(p-1)/p·γ; P ≠ p: + 2α + 2mβ + mγ", _halving_doubling
        ),
        (Kind.ALL_REDUCE, "ring"): Formula("2(P-1)α + 2m(P-1)/P·β + m(P-1)/P·γ", _chunked(_there_and_back, 2, 1)),
        (Kind.ALL_REDUCE, "direct"): Formula("2(P-1)α + 2m(P-1)/P·β + m(P-1)/P·γ", _chunked(_there_and_back, 2, 1)),
        (Kind.ALL_REDUCE, "bidirectional_ring"): Formula(
            "4(P-1)α + 2m(P-1)/P·β + m(P-1)/P·γ; two links: 2(P-1)α + m(P-1)/P·β + m(P-1)/P·γ", _bidirectional_ring
        ),
        (Kind.ALL_REDUCE, "torus"): Formula(
            "2(X+Y-2)α + 2m(P-1)/P·β + m(P-1)/P·γ", _chunked(lambda P: 2 * (sum(nearly_square(P)) - 2), 2, 1)
        ),
        (Kind.ALL_REDUCE, "double_binary_tree"): Formula("≈ 2(2hα + mβ + 2√(2hα·mβ)), segmented", _double_binary_tree),
        (Kind.REDUCE_SCATTER, "ring"): Formula("(P-1)α + m(P-1)/P·β + m(P-1)/P·γ", _chunked(_no_wait, 1, 1)),
        (Kind.REDUCE_SCATTER, "direct"): Formula("(P-1)α + m(P-1)/P·β + m(P-1)/P·γ", _chunked(_no_wait, 1, 1)),
        (Kind.ALL_GATHER, "ring"): Formula("(P-1)α + m(P-1)/P·β", _chunked(_no_wait, 1, 0)),
        (Kind.ALL_GATHER, "direct"): Formula("(P-1)α + m(P-1)/P·β", _chunked(_no_wait, 1, 0)),
        (Kind.GATHER, "direct"): Formula("(P-1)α + m(P-1)/P·β", _chunked(_no_wait, 1, 0)),
        (Kind.SCATTER, "direct"): Formula("(P-1)α + m(P-1)/P·β", _chunked(_no_wait, 1, 0)),
        (Kind.ALL_TO_ALL, "transpose"): Formula("(P-1)α + m(P-1)/P·β", _chunked(_no_wait, 1, 0)),
        (Kind.BROADCAST, "binomial"): Formula("h(α + mβ)", _whole(depth, lambda P: 0)),
        (Kind.BROADCAST, "chain"): Formula("(P-1)(α + mβ); k segments: (P+k-2)(α + m/k·β)", _whole(_no_wait, lambda P: 0)),
        (Kind.REDUCE, "binomial"): Formula("h(α + mβ + mγ)", _whole(depth, depth)),
        (Kind.BARRIER, "dissemination"): Formula("hα", lambda P, m, link: depth(P) * link.alpha),
    }
)
HIERARCHICAL_TEXT = (
    "k divides P: 2(k+G-2)α + 2m(P-1)/P·β + m(P-1)/P·γ; else 2(g+G-1)α + (2g + 2(G-1)/G)mβ + (g + (G-1)/G)mγ, "
    "with G = ⌈P/k⌉, g = ⌈log2 k⌉"
)


def closed_form(
    algorithm: str, size: int, num_bytes: float, link: LinkCosts, *, kind: Kind = Kind.ALL_REDUCE, group: int = 1
) -> float:
    """Seconds by the literature's formula, in whole messages (`double_binary_tree`: in the best segments)."""
    entry = find(kind, algorithm)
    if entry.with_group is not None:
        return _hierarchical(size, num_bytes, link, group)
    return FORMULAS[kind, entry.name].seconds(size, num_bytes, link)


def lower_bound(size: int, num_bytes: float, link: LinkCosts) -> float:
    """alpha log2 P + 2 m beta (P-1)/P: no all-reduce among `size` ranks is faster.

    With L lanes per rank each carries its share of the bytes, and news spreads (L+1)-fold per round: alpha log_(L+1) P.
    """
    return link.alpha * log2(size) / log2(link.lanes + 1) + 2 * num_bytes * (link.beta / link.lanes) * (size - 1) / size


def parameter_server_cost(size: int, num_bytes: float, link: LinkCosts, *, servers: int) -> float:
    """2 P gamma m G / s + 2 L: all workers push to, then pull from, s servers that hold equal parts of the model.

    Letters of Ben-Nun and Hoefler: gamma m is the vector in bytes (here `num_bytes`), G seconds per byte (`link.beta`),
    L the latency (`link.alpha`), s the servers. Each server takes in P parts of m/s one after the other, and gives out
    as many. Servers on machines of their own are outside the model of `lower_bound`, and may beat it.
    """
    if servers < 1:
        raise ConfigurationError(
            f"parameter_server_cost(servers={servers}): the model would be nowhere. Write at least servers=1."
        )
    return 2 * size * num_bytes * link.beta / servers + 2 * link.alpha
