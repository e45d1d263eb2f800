"""torch with one thread, in processes of pytest-xdist: the processors have their work, and threads of torch's own would only wait
for one another.

`torch.set_num_threads(1)` is not enough. It holds for the thread that calls it; in others MKL may still use two, whose products
differ in the last bit on some processors (seen on an AMD EPYC), and tests train in threads. OpenMP reads its variable once, when
it is loaded. It is taken back then: processes that tests start shall not inherit it.
"""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: F401

    del os.environ["OMP_NUM_THREADS"]
