"""How the workers of one host combine what they have, without a network.

    base      the contract: each member ends with the sum of its part, then all have every part
    mapped    memory that all of them map: host memory between processes of one machine
    by_wire   our own collectives, where nothing is faster
    choose    which of them a group of workers uses, and why; said once in the log
"""
