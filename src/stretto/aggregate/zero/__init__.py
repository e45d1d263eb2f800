"""Training with sharded state: `shard=Zero(stage)`.

slices.py           which part of a bucket is whose, and the pieces of parameters that lie in it
bucket.py           a bucket whose gradients end as slices, and the memory that buckets borrow while they are under way
gradient.py         what `p.grad` is then: a tensor of which each worker has a part
norms.py            norms over slices, of which everybody has some
slice_optimizer.py  the user's optimizer, stepping pieces, and its state in slices
stepping.py         a step: slice after slice, each given to the others as soon as it is taken
whole_state.py      that state, and gradients, whole again
compressed.py       codecs on the reduce-scatter, and on gathered weights
joining.py          what a worker without data has to do for the others
training.py         the rounds: reduce-scatter in place of all-reduce
admission.py        what is refused
cut/                parameters in slices too: stage 3
"""
