"""Gossip: every worker steps a model of its own, and after each step mixes it with those of a few neighbours.

graph.py, graphs.py     who is whose neighbour in which step, and with which weights: values with a spectral gap
mixing.py               the matrices behind them: Metropolis weights, connected, stochastic, how fast they forget differences
"""

from stretto.aggregate.gossip.graph import Graph as Graph
from stretto.aggregate.gossip.graphs import GRAPHS as GRAPHS
from stretto.aggregate.gossip.graphs import Complete as Complete
from stretto.aggregate.gossip.graphs import Exponential as Exponential
from stretto.aggregate.gossip.graphs import OnePeerExponential as OnePeerExponential
from stretto.aggregate.gossip.graphs import RandomMatching as RandomMatching
from stretto.aggregate.gossip.graphs import Ring as Ring
from stretto.aggregate.gossip.graphs import Star as Star
from stretto.aggregate.gossip.graphs import Torus as Torus
from stretto.aggregate.gossip.value import Gossip as Gossip
