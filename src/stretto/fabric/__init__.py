"""How the workers of one host combine what they have, without a network.

base       the contract: each member ends with the sum of its share, then all get every share
mapped     memory that all of them map: each adds up its share where the others have put theirs
by_wire    our own collectives, where nothing faster can be had
choose     which of them the workers of a host use, and why
"""
