"""Which answers go with gossip, which graphs, and which codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stretto.aggregate.gossip import mixing
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.aggregate.gossip.graphs import Complete, RandomMatching
from stretto.aggregate.gossip.value import Gossip
from stretto.compress.codec import Codec, Compression
from stretto.compress.error_feedback import ErrorFeedback
from stretto.errors import ConfigurationError
from stretto.schedule.orders import Buckets
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.noloco import NoLoCo
from stretto.sync.outer import Average
from stretto.sync.synchronous import Synchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy

ANY_SIZE: Final = 8  # a graph that changes with the step does so for this many workers


def gossip_of(strategy: Strategy) -> Gossip:
    assert isinstance(strategy.aggregate, Gossip), "another way of training"
    return strategy.aggregate


def check_answers(strategy: Strategy) -> None:
    gossip = gossip_of(strategy)
    asked = f"aggregate={gossip!r}"
    if strategy.schedule != Buckets():
        raise ConfigurationError(
            f"{asked} with schedule={strategy.schedule!r}: gradients stay where they are, and there are no transfers under "
            f"backward to put into an order.\nLeave schedule= out."
        )
    if not gossip.push_sum and not isinstance(strategy.sync, Synchronous):
        raise ConfigurationError(
            f"{asked} with sync={strategy.sync!r}: models that come late would be mixed with newer ones, and what is under way "
            f"would be missing in the mean. Push-sum accounts for it, with a mass that is under way too.\n"
            f"Write Gossip({gossip.graph!r}, push_sum=True), or sync=Synchronous()."
        )
    if not strategy.compress.lossless:
        _check_compressed(strategy, gossip, asked)


def check_asynchronous(strategy: Strategy) -> None:
    """Of `sync=Asynchronous()`, where pairs of workers average."""
    gossip = gossip_of(strategy)
    asked = f"aggregate={gossip!r} with sync={strategy.sync!r}"
    if strategy.sync != Asynchronous():
        raise ConfigurationError(
            f"{asked}: every worker steps by its own gradient, and no server corrects it for its staleness.\n"
            f"Write sync=Asynchronous()."
        )
    if gossip.pull != 1.0:
        raise ConfigurationError(f"{asked}: two workers become the mean of both, and no share of it.\nLeave pull= out.")
    if gossip.graph.directed:
        raise ConfigurationError(
            f"{asked}: two workers average with each other, both ways, and this graph is one-way.\n"
            f"Take another one, Gossip(Complete()) say, or write Gossip({gossip.graph!r}, push_sum=True) with sync=Synchronous()."
        )
    if not strategy.compress.lossless:
        raise ConfigurationError(
            f"{asked} and compress={strategy.compress!r}: workers send whole models to whoever is free, and what a codec leaves "
            f"out of them would be taken for their values.\nLeave compress= out, or write sync=Synchronous(), where neighbours "
            f"keep public copies."
        )
    if strategy.schedule != Buckets():
        raise ConfigurationError(
            f"{asked} and schedule={strategy.schedule!r}: gradients stay where they are, and there are no transfers under "
            f"backward to put into an order.\nLeave schedule= out."
        )


def check_outer_steps(strategy: Strategy) -> None:
    """Of `sync=LocalSGD(...)`, where workers train by themselves in between."""
    gossip, sync = gossip_of(strategy), strategy.sync
    assert isinstance(sync, LocalSGD), "another way of training"
    asked = f"aggregate={gossip!r} with sync={sync!r}"
    if not isinstance(sync.outer, (Average, NoLoCo)):
        raise ConfigurationError(
            f"{asked}: workers that meet only a few others have slow weights of their own, which momentum takes apart.\n"
            f"Write outer=NoLoCo(0.5, 0.7, 0.7), which pulls them together, or aggregate=AllReduce()."
        )
    if isinstance(sync.outer, NoLoCo) and not isinstance(gossip.graph, (RandomMatching, Complete)):
        raise ConfigurationError(
            f"{asked}: which pulls are stable is known for pairs that are drawn at random, and for all workers together.\n"
            f"Write Gossip(RandomMatching()), or outer=Average(), which is stable with every graph."
        )
    if sync.start_after or sync.optimizer_state != "keep" or sync.variant:
        raise ConfigurationError(
            f"{asked}: start_after, optimizer_state, fragments, overlap and merge are about what all workers do together.\n"
            f"Leave them out: LocalSGD({sync.every}, outer={sync.outer!r})."
        )
    if gossip.pull != 1.0 or gossip.graph.directed:
        raise ConfigurationError(
            f"{asked}: a pair moves to its mean, both ways, and how far is said by the outer optimizer.\n"
            f"Write Gossip(RandomMatching()), without pull=."
        )
    if not strategy.compress.lossless:
        raise ConfigurationError(
            f"{asked} and compress={strategy.compress!r}: whole slow weights travel, and what a codec leaves out of them would "
            f"be missing in the mean.\nLeave compress= out."
        )
    if strategy.schedule != Buckets():
        raise ConfigurationError(
            f"{asked} and schedule={strategy.schedule!r}: gradients stay where they are, and there are no transfers under "
            f"backward to put into an order.\nLeave schedule= out."
        )


def _check_compressed(strategy: Strategy, gossip: Gossip, asked: str) -> None:
    asked = f"{asked} with compress={strategy.compress!r}"
    if gossip.push_sum:
        raise ConfigurationError(
            f"{asked}: in push-sum a message is a share of the values, and what a codec left out of it would be lost while "
            f"its mass is there.\nWrite Gossip(Ring(), pull=0.1), where public copies make up for it, or leave compress= out."
        )
    if gossip.graph.directed or gossip.graph.period(ANY_SIZE) != 1:
        why = "is one-way" if gossip.graph.directed else "changes from step to step"
        raise ConfigurationError(
            f"{asked}: neighbours know each other's public copies, always the same ones both ways, and {gossip.graph!r} {why}.\n"
            f"Take a graph that is neither, Ring() or Torus() say, or leave compress= out."
        )
    if (reason := _why_no_copies(strategy.compress)) is not None:
        raise ConfigurationError(f"{asked}: {reason}")


def _why_no_copies(compression: Compression) -> str | None:
    if isinstance(compression, ErrorFeedback):
        return (
            f"what a payload leaves out stays in the difference from the public copy, and is sent later: that is error feedback "
            f"already.\nWrite compress={compression.codec!r}."
        )
    if not isinstance(compression, Codec):
        return (
            "it drives rounds of its own among all workers, or remembers by itself what it has not said, and here a worker sends "
            "to its neighbours alone.\nTake a codec that writes a vector by itself: TopK(0.05), Sign(), QSGD(8), Float16()."
        )
    if compression.no_contraction is not None or compression.hands_out != "mean":
        reason = compression.no_contraction or "it hands out a direction, not values"
        return f"{reason}, so public copies would not come closer to the models.\nTake TopK(0.05), Sign(), QSGD(8), Float16()."
    return None


def _check_both_ways(graph: MixingGraph, size: int, step: int) -> None:
    """A worker expects messages from its own targets, and would wait for those that do not send to it."""
    arcs = {*graph.arcs(size, step)}
    if one_way := sorted((sender, receiver) for sender, receiver in arcs if (receiver, sender) not in arcs):
        sender, receiver = one_way[0]
        raise ConfigurationError(
            f"{graph!r} in a job of {size} workers: worker {sender} sends to {receiver} in step {step}, and not the other way "
            f"round, but the graph does not say that it is one-way.\n"
            f"Write `directed = True` in its class, or let targets({receiver}, {size}, {step}) contain {sender}."
        )


def check_graph(gossip: Gossip, size: int) -> None:
    """In a job of so many workers: whoever has made the graph."""
    graph = gossip.graph
    graph.check_size(size)
    steps = range(graph.period(size) or 1)
    if not graph.directed:
        for step in steps:
            _check_both_ways(graph, size, step)
    every = [graph.weights(size, step) for step in steps]
    if not all(mixing.keeps_the_sum(weights) for weights in every):
        raise ConfigurationError(
            f"{graph!r} in a job of {size} workers: its mixing matrix is not stochastic. Weights are 0 or more, and each column, "
            f"what becomes of one worker's values, adds up to 1.\nLet workers keep what is left, as Metropolis weights do."
        )
    if not gossip.push_sum and not all(mixing.keeps_the_mean(weights) for weights in every):
        raise ConfigurationError(
            f"{gossip!r} in a job of {size} workers: rows of its mixing matrix do not add up to 1, so workers that agree would "
            f"not go on agreeing.\nWrite Gossip({graph!r}, push_sum=True), whose masses set that right, or a graph without "
            f"one-way edges."
        )
    if graph.period(size) is None:
        return
    groups = mixing.components([arc for step in steps for arc in graph.arcs(size, step)], size)
    if len(groups) > 1:
        raise ConfigurationError(
            f"{graph!r} is not connected in a job of {size} workers: {groups[0][:5]} and {groups[1][:5]} never hear of each "
            f"other.\nAdd an edge between the two, ({groups[0][-1]}, {groups[1][0]}) say."
        )
