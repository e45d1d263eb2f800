"""Synchronous all-reduce: the value that a strategy names (`value.py`) and how it trains (`training.py`, not imported here)."""

from stretto.aggregate.all_reduce.value import AllReduce as AllReduce
