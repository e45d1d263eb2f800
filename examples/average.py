"""Average a tensor over all workers.

stretto run -n 3 examples/average.py
stretto lab --hosts 3 -- python examples/average.py
"""

import torch

import stretto

stretto.init()
mine = torch.full((4,), float(stretto.rank()))
mean = stretto.all_reduce(mine)  # in place; op="mean" unless said otherwise
print(f"rank {stretto.rank()} of {stretto.world_size()}: {mean.tolist()}")
stretto.shutdown()
