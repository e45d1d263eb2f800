"""Protocols between workers, written as state machines without input or output.

    machine    the contract: events in, actions out
    loop       drives machines over a wire, in the communication thread
    timers     named timers, for whoever drives a machine

`stretto.testing.virtual_network` drives the same machines in virtual time, with faults from a seed.
"""
