"""LocalSGD: every worker takes `every` steps by itself; then all exchange how far they have come and go on from the same weights.

    every step                  x_i <- U_i(x_i, g_i)                        each worker's own optimizer, on its own batch
    every `every`-th step       Delta = (1/P) sum_i (theta - x_i)           theta: what all held after the exchange before
                                theta <- outer(theta, Delta),  x_i <- theta

With `outer=Average()`, the default, the new theta is the mean of the x_i. Others (`outer.py`) add a momentum over exchanges. With
`every=1` and SGD without momentum a step is that of `Synchronous()`: the mean of x - eta g_i is x - eta mean(g_i).

`start_after`: this many steps are synchronous first (post-local SGD): gradients are all-reduced, and each step is exactly that of
`Synchronous()`, also with momentum and Adam, whose state is then the same on all workers. Averaging weights after every step
would be the same only for SGD without momentum.

`optimizer_state`: what becomes of each worker's optimizer state (momentum, Adam's means) at an exchange.

    "keep"       nothing: it is each worker's own for good. Costs nothing; DiLoCo and most published results have it so
    "average"    every tensor of it that has the shape of its parameter becomes the mean, for parameters that have one on all
                 workers. One more exchange for each kind of such tensors (SGD with momentum: 1, Adam: 2)
    "reset"      it is discarded, and begins anew

`fragments`, `overlap`, `merge` (streaming): the model is exchanged in this many parts, each once in `every` steps, one after the
other. Each exchange runs in the background for `overlap` steps; `merge` is the share of a worker's own value that then stays.
`aggregate/local_sgd/streaming.py` has the formulas.

`grow_to`: the period grows from `every` up to this while the replicas agree; `growing_period.py` has the rule. Each exchange
carries one number more, and it is of differences, for which theta is kept, where otherwise weights would do.

Cost:      one all-reduce of the weights, 4 bytes a parameter or what `compress` makes of them, in every `every`-th step: `every`
           times less than synchronous training sends, and `every` times fewer waits for the slowest worker. Memory: one vector as
           long as the model during an exchange; with momentum theta and a velocity, two more, all the time.
Invariant: after each exchange all workers hold the same bits.
Reference: Stich, "Local SGD converges fast and communicates little", ICLR 2019, arXiv:1805.09767; McMahan et al.,
           "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017 (FedAvg); Lin et al., "Don't
           use large mini-batches, use local SGD", ICLR 2020, arXiv:1808.07217 (post-local).
Departs:   the change to local steps comes after a number of steps; Lin et al. make it where the learning rate first falls.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Literal, get_args

from stretto.errors import ConfigurationError
from stretto.sync.counts import check_count
from stretto.sync.noloco import NoLoCo
from stretto.sync.outer import Average, HeavyBall, Nesterov, Outer, SlowMo

OptimizerState = Literal["keep", "average", "reset"]
STREAMING: Final = "fragments, overlap, merge"  # the variant that has any of these
OUTER: Final = (Average, HeavyBall, Nesterov, SlowMo, NoLoCo)


@dataclass(frozen=True, slots=True)
class LocalSGD:
    """`every` steps of each worker's own, then an exchange. Typical: 4 to 64; with `outer=Nesterov(0.7, 0.9)` 100 to 500.

    `outer`: what is made of the mean progress. `start_after`: this many synchronous steps first. `optimizer_state`: what becomes
    of it at an exchange. `fragments`: the model is exchanged in this many parts, one after the other. `overlap`: an exchange runs
    in the background for this many steps. `merge`: the share of a worker's own value that stays then. `grow_to`: the period may
    grow up to this, while workers agree."""

    every: int
    _: KW_ONLY
    outer: Outer = field(default_factory=Average)
    start_after: int = 0
    optimizer_state: OptimizerState = "keep"
    fragments: int = 1
    overlap: int = 0
    merge: float = 0.0
    grow_to: int | None = None

    @property
    def variant(self) -> str:
        """Which of the extensions is asked for; none is the blocking exchange of the whole model after equal periods."""
        if self.grow_to is not None:
            return "grow_to"
        return STREAMING if (self.fragments, self.overlap, self.merge) != (1, 0, 0) else ""

    def __post_init__(self) -> None:
        check_count(
            "LocalSGD", "every", self.every,
            least=1, meaning="the number of steps from one exchange to the next",
            instead="LocalSGD(1) for an exchange after each step, LocalSGD(16) for one after 16",
        )  # fmt: skip
        check_count(
            "LocalSGD", "start_after", self.start_after,
            least=0, meaning="the number of synchronous steps at the beginning",
            instead="start_after=1000, or leave it out to begin with local steps at once",
        )  # fmt: skip
        if not isinstance(self.outer, OUTER):
            names = ", ".join(f"{kind.__name__}(...)" for kind in OUTER[1:])
            raise ConfigurationError(
                f"LocalSGD({self.every}, outer={self.outer!r}): not an outer optimizer.\nWrite one of Average(), {names}."
            )
        if self.optimizer_state not in get_args(OptimizerState):
            raise ConfigurationError(
                f"LocalSGD({self.every}, optimizer_state={self.optimizer_state!r}): what becomes of momentum and other state of "
                f'each worker\'s optimizer at an exchange.\nWrite "keep", "average" or "reset".'
            )
        self._check_streaming()
        self._check_growing()

    def _check_growing(self) -> None:
        if self.grow_to is None:
            return
        check_count(
            "LocalSGD", "grow_to", self.grow_to,
            least=self.every, meaning=f"how long the period, which begins at every={self.every}, may become",
            instead=f"grow_to={8 * self.every}, or leave it out for periods of {self.every}",
        )  # fmt: skip
        if (self.fragments, self.overlap, self.merge) != (1, 0, 0):
            raise ConfigurationError(
                f"LocalSGD({self.every}, grow_to={self.grow_to}) with fragments, overlap or merge: whether workers agree is seen "
                f"where all of the model comes together.\nWrite grow_to={self.grow_to} without them, or leave it out."
            )

    def _check_streaming(self) -> None:
        check_count(
            "LocalSGD", "fragments", self.fragments,
            least=1, meaning="how many parts the model is exchanged in, one after the other",
            instead="fragments=4, or leave it out to exchange the whole model at once",
        )  # fmt: skip
        check_count(
            "LocalSGD", "overlap", self.overlap,
            least=0, meaning="the number of steps that an exchange has time for",
            instead="overlap=5, or leave it out to wait for each exchange",
        )  # fmt: skip
        if self.every % self.fragments:
            divisors = [count for count in range(1, self.every + 1) if self.every % count == 0]
            below, above = max(d for d in divisors if d < self.fragments), [d for d in divisors if d > self.fragments][:1]
            periods = [period for period in (self.every // self.fragments * self.fragments,) if period]
            periods.append((self.every // self.fragments + 1) * self.fragments)
            raise ConfigurationError(
                f"LocalSGD({self.every}, fragments={self.fragments}): one of the fragments is exchanged every "
                f"{self.every} / {self.fragments} steps, and {self.fragments} does not divide {self.every}.\n"
                f"Write fragments={' or '.join(map(str, [below, *above]))}; or every={' or '.join(map(str, periods))}."
            )
        if self.overlap >= (spacing := self.every // self.fragments):
            more = (self.overlap + 1) * self.fragments
            raise ConfigurationError(
                f"LocalSGD({self.every}, fragments={self.fragments}, overlap={self.overlap}): an exchange begins every "
                f"{spacing} steps, and the one before must have ended by then.\n"
                f"Write overlap={spacing - 1} or less, or every={more}."
            )
        if isinstance(self.merge, bool) or not isinstance(self.merge, (int, float)) or not 0 <= self.merge <= 1:
            raise ConfigurationError(
                f"LocalSGD({self.every}, merge={self.merge!r}): the share of a worker's own value that stays when a fragment is "
                f"applied, from 0 to 1.\nWrite merge=0.5, or leave it out for 0: workers go on from what they came to together."
            )
        if self.variant and self.optimizer_state != "keep":
            raise ConfigurationError(
                f"LocalSGD({self.every}, optimizer_state={self.optimizer_state!r}) with fragments, overlap or merge: there is no "
                f'step at which all of the model comes together.\nWrite optimizer_state="keep", or leave these out.'
            )
