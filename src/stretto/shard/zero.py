"""Zero: model state that every worker would hold in full is cut into slices, one for each worker.

    stage 1     optimizer state
    stage 2     and gradients: freed as soon as their slice is reduced
    stage 3     and parameters: gathered for as long as a module computes with them

Bytes of memory per parameter, P workers, float32 and an optimizer that keeps k vectors (Adam 2, SGD with momentum 1):

    Replicated  4 + 4 + 4k          stage 1  4 + 4 + 4k/P          stage 2  4 + 4/P + 4k/P
    stage 3     (4 + 4 + 4k)/P, and the parameters and gradients of the modules that compute

Reference: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020;
           Ren et al., "ZeRO-Offload", USENIX ATC 2021, for `offload`; Wang et al., "ZeRO++", arXiv:2306.10209, for `weights`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal

from stretto.compress.codec import Compression
from stretto.errors import ConfigurationError

STAGES: Final = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Zero:
    """Each worker keeps and steps a slice of the optimizer's state (`stage=1`), of the gradients too (`stage=2`), and of
    the parameters too (`stage=3`), which are gathered before each module computes and free afterwards.

    `offload="cpu"`: that state is in host memory, and the step is taken there. `weights`: a codec in which stepped slices are
    given to the others; the owner keeps the unrounded ones.
    """

    stage: int
    _: KW_ONLY
    offload: Literal["cpu"] | None = None
    weights: Compression | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise ConfigurationError(
                f"Zero({self.stage!r}): the stages are 1 (optimizer state is cut into slices), 2 (gradients too) and 3 "
                f"(parameters too).\nWrite Zero(1), Zero(2) or Zero(3); what is whole on each worker is Replicated()."
            )
        if self.offload not in (None, "cpu"):
            raise ConfigurationError(
                f"Zero(offload={self.offload!r}): optimizer state can be where the parameters are, or in host memory.\n"
                f'Leave offload out, or write offload="cpu".'
            )
        if self.weights is not None and not isinstance(self.weights, Compression):
            raise ConfigurationError(
                f"Zero(weights={self.weights!r}): that is no codec. Write for instance weights=Int8(), or leave it out."
            )

    @property
    def variant(self) -> str:
        """Which way to train it names."""
        return "stage=3" if self.stage == 3 else ""
