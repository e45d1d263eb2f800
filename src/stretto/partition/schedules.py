"""In which order a stage computes the forwards and backwards of micro-batches: four answers, each a plan as data.

K stages, M micro-batches; stages are numbered from 0 in the order of layers. The *bubble* is the share of its time in which a
stage waits, where all forwards take one time and all backwards another.

                              bubble                       activations held by stage k, in micro-batches
    GPipe                     (K-1) / (M+K-1)              M
    OneForwardOneBackward     (K-1) / (M+K-1)              min(M, K-k)
    ... (eager=E)             the same                     min(M, 1 + (1+E) (K-k-1))
    Interleaved(V)            (K-1) / (V M+K-1)            of 1/V of its layers each: about (V-1) K + 2 (K-k) - 1
    ZeroBubble                about (K-1) / (3 M+K-1)      at most min(M, K+1)

`walk.py` carries plans out on paper; tests do so for all K, M and V up to 8, 24 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from stretto.errors import ConfigurationError
from stretto.partition.actions import Order, PipelinePlan, StageAction, Work
from stretto.partition.zero_bubble import greedy_orders
from stretto.plain_calls import CallReader

F, B = Work.FORWARD, Work.BACKWARD


@runtime_checkable
class PipelineSchedule(Protocol):
    """What `schedule=` of `stretto.pipeline` takes: one of the values below, or your own. Its plans are checked before use."""

    @property
    def chunks(self) -> int:
        """How many parts of the model each stage holds."""
        ...

    def plan(self, stages: int, microbatches: int) -> PipelinePlan:
        """What each stage computes, in order. Called for the number of micro-batches of each batch: the last may have fewer."""
        ...


@dataclass(frozen=True, slots=True)
class GPipe:
    """All forwards, then all backwards. Simple, and holds the activations of the whole batch unless they are recomputed.

    Reference: Huang et al., "GPipe", NeurIPS 2019.
    """

    @property
    def chunks(self) -> int:
        return 1

    def plan(self, stages: int, microbatches: int) -> PipelinePlan:
        forwards = tuple(StageAction(F, number) for number in range(microbatches))
        backwards = tuple(StageAction(B, number) for number in range(microbatches))
        return PipelinePlan(microbatches, 1, (forwards + backwards,) * stages)


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """1F1B: after (1+E) (K-k-1) forwards stage k computes a forward and a backward in turn. As fast as GPipe, and holds one
    micro-batch more than that.

    E = 0 holds the fewest. But then a stage computes its next forward only when the gradient of an earlier one has come, and the
    stage after it waits for that forward: in every round each pair of neighbours waits for a letter there and a letter back. With
    E = 1 these travel while something else is computed, as long as there and back take less than a forward and a backward
    together; with E = 2, twice as long, and so on.

    Reference: Narayanan et al., "PipeDream", SOSP 2019, with the flush of "Memory-Efficient Pipeline-Parallel DNN Training",
    ICML 2021 (PipeDream-flush): all micro-batches of a step see one version of the weights. E = 1 is the eager 1F1B of Zhuang et
    al., "On Optimizing the Communication of Model Parallelism", MLSys 2023.
    """

    eager: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.eager, bool) or not isinstance(self.eager, int) or self.eager < 0:
            raise ConfigurationError(
                f"OneForwardOneBackward(eager={self.eager!r}): how many forwards more than it must each stage computes ahead, "
                f"for each stage after it; a whole number, 0 or more.\n"
                f"Write OneForwardOneBackward(), or eager=1 on a slow network."
            )

    @property
    def chunks(self) -> int:
        return 1

    def plan(self, stages: int, microbatches: int) -> PipelinePlan:
        forwards = [StageAction(F, number) for number in range(microbatches)]
        backwards = [StageAction(B, number) for number in range(microbatches)]
        orders = (in_turn(forwards, backwards, (1 + self.eager) * (stages - stage - 1)) for stage in range(stages))
        return PipelinePlan(microbatches, 1, tuple(orders))


@dataclass(frozen=True, slots=True)
class Interleaved:
    """1F1B where each stage holds `chunks` parts of the model, one from each round through all stages: the bubble shrinks by that
    factor, and messages are as many times more. Where K does not divide M, micro-batches go round in groups of more than K.

    Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, where
    K must divide M.
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 2:
            raise ConfigurationError(
                f"Interleaved(chunks={self.chunks!r}): how many parts of the model each stage holds, a whole number, 2 or more.\n"
                f"Write Interleaved(2), or OneForwardOneBackward() for one part."
            )

    def plan(self, stages: int, microbatches: int) -> PipelinePlan:
        groups = groups_of(microbatches, stages)
        forwards = [StageAction(F, number, chunk) for group in groups for chunk in range(self.chunks) for number in group]
        backwards = [action._replace(work=B, chunk=self.chunks - 1 - action.chunk) for action in forwards]
        ahead = (self.chunks - 1) * max(map(len, groups))
        orders = (in_turn(forwards, backwards, 2 * (stages - stage - 1) + ahead) for stage in range(stages))
        return PipelinePlan(microbatches, self.chunks, tuple(orders))


@dataclass(frozen=True, slots=True)
class ZeroBubble:
    """1F1B with backwards in two: gradients of inputs, which the stage before waits for, and those of parameters, which fill the
    time in which there is nothing else to do (ZB-H1). Holds a little more than 1F1B.

    Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; `zero_bubble.py` has how the plan is found.
    """

    @property
    def chunks(self) -> int:
        return 1

    def plan(self, stages: int, microbatches: int) -> PipelinePlan:
        return PipelinePlan(microbatches, 1, greedy_orders(stages, microbatches))


KNOWN = {kind.__name__: kind for kind in (GPipe, OneForwardOneBackward, Interleaved, ZeroBubble)}
READER = CallReader(KNOWN, what="schedule of a pipeline", example="OneForwardOneBackward()")


def groups_of(microbatches: int, stages: int) -> list[range]:
    """Micro-batches that pass through one part after another together: at least as many as there are stages, in groups as equal
    as can be. Smaller groups would leave stages waiting for a micro-batch to come round."""
    number = max(1, microbatches // stages)
    bounds = [microbatches * each // number for each in range(number + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def in_turn(forwards: list[StageAction], backwards: list[StageAction], ahead: int) -> Order:
    """So many forwards first, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - ahead :])
