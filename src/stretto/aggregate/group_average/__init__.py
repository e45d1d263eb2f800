"""Groups of workers that average their models, other groups in each round (WAGMA, Moshpit).

cube         workers as corners of a cube: groups, partners, and the tree along which a round is made known
butterfly    the sum of one round, as one worker forms it, with whoever is there
messages     what workers say to each other
machine      rounds, and when each worker takes part in them
rules        what becomes of a worker's model when a round has ended
training     `WaitAvoidingAverage`, the way to train by WAGMA; `averaged` buffers are part of the models

grid         workers on a grid, and its groups
among        a machine for all workers, run among those of a group
grid_training  `GridAverage`, the way to train by Moshpit SGD

admission    what cannot be trained so
"""

from stretto.aggregate.group_average.value import GroupAverage as GroupAverage
