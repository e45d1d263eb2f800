"""Hogwild: the workers of one host step the same weights, in memory that all of them have mapped, without locks."""

from stretto.aggregate.shared_memory.value import SharedMemory as SharedMemory
