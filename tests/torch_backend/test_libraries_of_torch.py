"""What is written for torch.distributed, unchanged, on our backend: the result is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from preloaded import Preloaded
from torch_backend import libraries, sharding

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
ALL = tuple(libraries.FUNCTIONS)


@pytest.mark.parametrize(
    ("size", "names", "is_long"),
    [
        (2, ALL, False),
        (4, ("hybrid", "tensor_parallel"), False),
        pytest.param(2, ALL, True, marks=pytest.mark.slow),
        pytest.param(4, ALL, True, marks=pytest.mark.slow),
    ],
)
def test_torchs_libraries_give_the_result_of_one_process(
    size: int, names: tuple[str, ...], is_long: bool, preloaded: Preloaded, tmp_path: Path
) -> None:
    results = preloaded.launch(libraries.run, size, list(names), str(tmp_path), is_long, timeout_s=200)
    for result in results:
        assert result.keys() == set(names)
        assert {name: worst for name, worst in result.items() if not worst < 1e-5} == {}, result


@pytest.mark.slow
def test_a_distributed_checkpoint_goes_on_in_a_world_of_another_size(preloaded: Preloaded, tmp_path: Path) -> None:
    """With the state of the optimizer: without it, AdamW would begin anew and go another way."""
    for turn, size in enumerate((4, 2, 3)):
        for worst in preloaded.launch(sharding.train_from_checkpoint, size, str(tmp_path), 5 * turn, 5):
            assert worst < 1e-5
