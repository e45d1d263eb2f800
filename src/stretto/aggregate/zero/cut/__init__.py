"""Stage 3 of `Zero`: the parameters are in slices too.

units.py        which parameters are gathered together, from the tree of modules
freed.py        what a parameter is while its values are in slices
memory.py       the slices of some parameters, and memory for all of their values while they are gathered
gathering.py    gathers, and which begins while another one is computed with
passes.py       hooks of modules and autograd: when a unit is gathered, and when it is free again
stepping.py     a step, after which nothing is given to the others
state_dicts.py  the plain `state_dict` of a model in slices, and loading one
training.py     the way of training
admission.py    what is refused
"""
