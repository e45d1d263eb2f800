"""One sentence on what holds the job back: each rule by a trace that shows just that."""

from __future__ import annotations

from typing import Any

import pytest

from report.traces import job, span, trace
from stretto.plan.planned import PlannedStep
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.transfers import Transfer, TransferPlan
from stretto.report.bottleneck import find_bottleneck
from stretto.report.figures import job_figures


def found(*ranks: dict[str, Any], planned: PlannedStep | None = None) -> tuple[str, str]:
    result = find_bottleneck(job_figures(job(*ranks)), planned)
    return result.kind, result.sentence


def planned(schedule: str = "Buckets()", transfers: int = 20, start_s: float = 0.0, per_byte_s: float = 0.0) -> PlannedStep:
    cost = TransferCost(start_s=start_s, per_byte_s=per_byte_s)
    profile = StepProfile(
        model="Net", digest="", world_size=2, steps=1, forward_s=0.0, backward_s=0.0, update_s=0.0, modules=(), parameters=(),
        cost=cost,
    )  # fmt: skip
    each = tuple(Transfer(parameters=(f"p{number}",), num_bytes=1000) for number in range(transfers))
    return PlannedStep(plan=TransferPlan(schedule=schedule, transfers=each), profile=profile)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_computation(world_size: int) -> None:
    kind, sentence = found(*[{"compute": 97.0, "network": [(10.0, 60.0)]} for _ in range(world_size)])
    assert kind == "compute"
    assert "97 % of a step (97.0 ms of 100 ms)" in sentence and "at most 3 %" in sentence


@pytest.mark.parametrize("slow", [0, 2])
def test_a_straggler_that_the_others_wait_for(slow: int) -> None:
    ranks = [{"compute": 60.0, "wait": 38.0} for _ in range(4)]
    ranks[slow] = {"compute": 96.0, "wait": 1.0}
    kind, sentence = found(*ranks)
    assert kind == "straggler"
    assert sentence.startswith(f"Rank {slow}: it computes 96.0 ms a step and the others 60.0 ms (1.60 times as long)")
    assert "wait 38.0 ms a step" in sentence


def test_a_rank_that_is_a_little_slower_or_that_nobody_waits_for_is_no_straggler() -> None:
    network = {"network": [(0.0, 99.0)]}
    assert found({"compute": 60.0, "wait": 38.0, **network}, {"compute": 68.0, "wait": 30.0, **network})[0] != "straggler"
    assert found({"compute": 40.0, "wait": 1.0, **network}, {"compute": 60.0, "wait": 30.0, **network})[0] != "straggler"
    # All wait long for the network, and a little longer for rank 1: it is not what they wait for.
    assert found({"compute": 20.0, "wait": 79.0, **network}, {"compute": 24.0, "wait": 75.0, **network})[0] == "network"


def test_the_loop_itself() -> None:
    kind, sentence = found({"compute": 60.0, "wait": 38.0}, {"compute": 60.0, "wait": 2.0})
    assert kind == "loop" and "rank 1 spends 38 % of a step (38.0 ms of 100 ms)" in sentence and "DataLoader" in sentence


def test_ranks_that_wait_for_one_another() -> None:
    """Nothing is on its way for most of what they wait, and none computes longer than the others."""
    kind, sentence = found(*[{"compute": 60.0, "wait": 38.0, "network": [(96.0, 99.0)]}] * 3)
    assert kind == "uneven"
    assert "waits 36.0 ms of a step of 100 ms (36 %)" in sentence and "all communication takes 3.00 ms" in sentence


def test_the_network() -> None:
    kind, sentence = found(*[{"compute": 40.0, "wait": 59.0, "network": [(5.0, 99.0)]}] * 2)
    assert kind == "network"
    assert "communicates 94.0 ms and computes 40.0 ms (rho 2.35, alpha 0.85)" in sentence
    assert "`compress=`" in sentence and "1.00 MB" in sentence
    # Not hidden at all, and still the network: hiding 20 ms of 80 behind the computation would leave 80.
    assert found(*[{"compute": 20.0, "wait": 79.0, "network": [(20.0, 100.0)]}] * 2)[0] == "network"


def test_poor_overlap() -> None:
    ranks = [{"compute": 50.0, "wait": 49.0, "network": [(46.0, 99.0)]}] * 2
    kind, sentence = found(*ranks)
    assert kind == "overlap"
    assert "53.0 ms of communication and 50.0 ms of computation take 100 ms (alpha 0.06, rho 1.06)" in sentence
    assert "save up to 47.0 ms" in sentence
    assert "schedule=Priority(cross_barrier=True)" in sentence
    kind, sentence = found(*ranks, planned=planned("Priority(cross_barrier=True)", transfers=1))
    assert kind == "overlap" and "already" in sentence and "schedule=" not in sentence


def test_latency_by_size_or_by_what_a_profile_says() -> None:
    small = [{"compute": 50.0, "wait": 49.0, "network": [(46.0, 99.0)], "messages": 40, "num_bytes": 2_000}] * 2
    kind, sentence = found(*small)
    assert kind == "latency" and "40 messages of 2.00 KB on average" in sentence and "Merged()" in sentence
    assert found(*small, planned=planned(start_s=1e-3, per_byte_s=1e-9))[0] == "latency"
    assert found(*small, planned=planned(start_s=1e-9, per_byte_s=1e-3))[0] == "overlap"  # the bytes are what takes so long
    large = [{**each, "num_bytes": 2_000_000} for each in small]
    assert found(*large)[0] == "overlap"


def test_what_is_left_of_a_communication_that_is_mostly_hidden() -> None:
    kind, sentence = found(*[{"compute": 85.0, "wait": 14.0, "network": [(40.0, 99.0)]}] * 2)
    assert kind == "tail" and "alpha 0.75, rho 0.69" in sentence and "15.0 ms of a step of 100 ms (15 %)" in sentence


def test_there_are_jobs_without_steps_and_without_communication() -> None:
    nothing = find_bottleneck(job_figures([trace(0, [span("send", "send to 1", 0, 5, peer=1, bytes=10)])]))
    assert nothing.kind == "steps"
    alone = {"compute": 85.0, "wait": 4.0}
    assert found(alone)[0] == "nothing" and "waits 4.00 ms" in found(alone)[1]
