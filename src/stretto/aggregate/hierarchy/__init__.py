"""Two levels: workers of one host combine over what they share, and hosts over the network."""

from stretto.aggregate.hierarchy.value import Hierarchy as Hierarchy
