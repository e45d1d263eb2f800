"""OneBitAdam: Adam in the warm-up, conservation after it, entries without variance, resuming."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.together import Workers
from stretto.compress.codec import Codec
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.qsgd import QSGD
from stretto.compress.random_k import RandomK
from stretto.compress.sign import Sign
from stretto.compress.state import SERVER, CompressionState
from stretto.compress.top_k import TopK
from stretto.errors import ConfigurationError

SHAPES: list[tuple[str, tuple[int, ...]]] = [("w", (8, 9)), ("bias", (11,)), ("empty", (0,)), ("v", (40,)), ("scalar", ())]
SIGN = Sign(block=16)
CODECS = [SIGN, TopK(0.2), RandomK(0.3)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(workers: Workers, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(workers.layout.num_elements, generator=generator) for _ in workers.states]


def flat_sum(workers: Workers, kind: str) -> Tensor:
    """Over workers, as one vector, also of what each keeps a part of."""
    exported = [state.own.export() for state in workers.states]
    kept = [torch.stack([one[place.name][kind].flatten() for one in exported]) for place in workers.layout.places]
    return torch.cat([rows.sum(0) for rows in kept])


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_in_the_warm_up_it_is_adam(size: int, betas: tuple[float, float]) -> None:
    workers = Workers(OneBitAdam(warm_up=20, betas=betas), SHAPES, size)
    n = workers.layout.num_elements
    ours, theirs = torch.zeros(n), torch.nn.Parameter(torch.zeros(n))
    adam = torch.optim.Adam([theirs], lr=0.01, betas=betas)
    for number in range(20):
        grads = [grad * 10.0 ** (number % 5 - 2) for grad in gradients(workers, number)]
        ours -= 0.01 * workers.round(grads)[0]
        theirs.grad = torch.stack(grads).mean(0)
        adam.step()
    torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)
    assert ours.norm() > 0.1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_momentum_is_conserved_and_the_same_everywhere(size: int, codec: Codec) -> None:
    """m, and the residuals, is the mean of what was to be sent: b1 m + (1 - b1) g_i, and the residuals before."""
    workers = Workers(OneBitAdam(warm_up=3, codec=codec), SHAPES, size)
    two_phase = codec.splits and size > 2

    def unsaid() -> Tensor:
        rest = flat_sum(workers, RESIDUAL) / size
        return rest + flat_sum(workers, SERVER) if two_phase else rest

    for number in range(20):
        grads = gradients(workers, number)
        m = workers.states[0].shared.flat("m").clone()
        before = unsaid() if number > 3 else torch.zeros_like(m)
        first, *others = workers.round(grads)
        assert all(torch.equal(first, other) for other in others)
        for kind in ("m", "v"):
            vectors = [state.shared.flat(kind) for state in workers.states]
            assert all(torch.equal(vectors[0], other) for other in vectors)
        if number >= 3:
            asked = 0.9 * m + 0.1 * torch.stack(grads).mean(0) + before
            torch.testing.assert_close(workers.states[0].shared.flat("m") + unsaid(), asked, atol=1e-5, rtol=1e-5)


def test_the_variance_stays_after_the_warm_up_and_divides() -> None:
    workers = Workers(OneBitAdam(warm_up=4, codec=SIGN), SHAPES, 2)
    for number in range(4):
        workers.round(gradients(workers, number))
    frozen = workers.states[0].shared.flat("v").clone()
    for number in range(4, 9):
        direction = workers.round(gradients(workers, number))[0]
        assert torch.equal(workers.states[0].shared.flat("v"), frozen)
        m = workers.states[0].shared.flat("m") / (1 - 0.9 ** (number + 1))
        torch.testing.assert_close(direction, m / ((frozen / (1 - 0.999**4)).sqrt() + 1e-8), atol=1e-6, rtol=1e-5)


def test_nothing_jumps_when_compression_begins() -> None:
    """With a codec that says everything, the round after a short warm-up differs from Adam by the variance alone."""
    workers, adam = (Workers(OneBitAdam(warm_up=n, codec=TopK(1.0)), [("w", (30,))], 2) for n in (2, 99))
    for _ in range(3):  # constant gradients: the variance, its bias corrected, is constant too
        grads = gradients(workers)
        torch.testing.assert_close(workers.round(grads)[0], adam.round(grads)[0], atol=1e-6, rtol=1e-5)


def test_entries_without_variance_get_nothing() -> None:
    """Signs have no zero: of a row that never had a gradient the momentum is not zero, and would be divided by eps."""
    workers = Workers(OneBitAdam(warm_up=3, codec=SIGN), [("embedding", (6, 8))], 3)
    unused = torch.zeros(6, 8, dtype=torch.bool)
    unused[1:3] = True
    for number in range(12):
        grads = [grad.masked_fill(unused.flatten(), 0.0) if number < 8 else grad for grad in gradients(workers, number)]
        direction = workers.round(grads)[0].view(6, 8)
        assert direction.abs().max() < 100
        assert not direction[unused].any() and direction[~unused].any()
    assert workers.states[0].shared.flat("m").view(6, 8)[unused].any()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("after", [2, 7])
def test_a_resumed_run_has_the_same_bits(codec: Codec, after: int) -> None:
    compression = OneBitAdam(warm_up=4, codec=codec)
    workers, other = (Workers(compression, SHAPES, 3) for _ in range(2))
    for number in range(after):
        workers.round(gradients(workers, number))
    for rank, (old, new) in enumerate(zip(workers.states, other.states, strict=True)):
        compression.restore(new, old.own.export(), old.shared.export(), rank, 3)
        new.rounds = old.rounds
    other.rounds = workers.rounds
    for number in range(after, 12):
        grads = gradients(workers, number)
        assert torch.equal(workers.round(grads)[0], other.round(grads)[0])


@pytest.mark.parametrize("after", [2, 7])
def test_a_discarded_round_leaves_everything(after: int) -> None:
    workers, other = (Workers(OneBitAdam(warm_up=4, codec=SIGN), SHAPES, 3) for _ in range(2))
    for number in range(after):
        grads = gradients(workers, number)
        workers.round(grads), other.round(grads)
    other.round(gradients(other, 99), commit=False)
    other.rounds -= 1  # the round is repeated
    for number in range(after, 10):
        grads = gradients(workers, number)
        assert torch.equal(workers.round(grads)[0], other.round(grads)[0])


# A worker of P, on a processor of its own kind: what came from the wire is read from a file, so it is the same for all of them.
# The first to run has no such file yet, and writes one with what all P workers would have sent.
ONE_WORKER = """
import hashlib, sys
from pathlib import Path
import torch
from compress.together import Workers
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.sign import Sign
from stretto.compress.top_k import TopK

class Recorded(Workers):
    came = []
    def carry_out(self, asked):
        results = super().carry_out(asked)
        self.came.append(results[-1].clone())
        return results

def all_workers(workers, number):
    generator = torch.Generator().manual_seed(number)
    return workers.round([torch.randn(5003, generator=generator) for _ in workers.states])[-1]

def last_worker(workers, number, came):
    values, rank = torch.zeros(5003), len(workers.states) - 1
    steps = workers.compression.exchange(values, workers.turn(rank))
    asked = next(steps, None)
    while asked is not None:
        try:
            asked = steps.send(came.pop(0))
        except StopIteration:
            asked = None
    workers.states[rank].commit()
    workers.rounds += 1
    return values

torch.set_num_threads(1)
file, digest = Path(sys.argv[1]), hashlib.sha256()
came = torch.load(file) if file.exists() else None
for size, codec in ((2, Sign(block=64)), (3, Sign(block=64)), (2, TopK(0.1))):
    workers = Recorded(OneBitAdam(warm_up=4, codec=codec), [("w", (61, 82)), ("bias", (1,))], size)
    parameters = torch.zeros(5003)
    for number in range(10):
        values = all_workers(workers, number) if came is None else last_worker(workers, number, came)
        parameters -= 0.1 * values
        digest.update(values.numpy().tobytes() + parameters.numpy().tobytes())
    for kind in ("m", "v"):
        digest.update(workers.states[-1].shared.flat(kind).numpy().tobytes())
if came is None:
    torch.save(Recorded.came, file)
print(torch.backends.cpu.get_cpu_capability(), digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.processes
def test_unlike_processors_compute_the_same_bits(tmp_path: Path) -> None:
    """torch multiplies and adds in one rounding where the processor can, and in two where it cannot."""
    found = [_run_worker(tmp_path / "from_the_wire", capability) for capability in (None, "default")]
    (own, digest), (plain, other) = found
    if own == plain:
        pytest.skip(f"this processor has no other vector code than {own}")
    assert digest == other


def _run_worker(file: Path, capability: str | None) -> list[str]:
    environ = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    environ |= {} if capability is None else {"ATEN_CPU_CAPABILITY": capability}
    tests = Path(__file__).parents[1]
    environ["PYTHONPATH"] = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    command = [sys.executable, "-c", ONE_WORKER, str(file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_bytes_after_the_warm_up_are_those_of_the_codec(size: int) -> None:
    compression = OneBitAdam(warm_up=1, codec=SIGN)
    workers = Workers(compression, SHAPES, size)
    workers.round(gradients(workers))
    assert workers.bytes_sent == [0] * size  # a sum
    workers.round(gradients(workers))
    assert workers.bytes_sent == [compression.bytes_sent(workers.layout, rank, size) for rank in range(size)]


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-45, 1e30, 1e38])
def test_awkward_values(value: float) -> None:
    workers = Workers(OneBitAdam(warm_up=2, codec=SIGN), SHAPES, 3)
    constant = torch.full((workers.layout.num_elements,), value)
    one_hot = torch.zeros_like(constant)
    one_hot[5] = value
    for _ in range(4):
        assert workers.round([constant, one_hot, constant])[0].isfinite().all()
    assert all(state.shared.flat(kind).isfinite().all() for state in workers.states for kind in ("m", "v"))


@pytest.mark.parametrize("codec", [SIGN, Sign()], ids=repr)
def test_it_converges(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, solution = torch.randn(4, 50, 24, generator=generator), torch.randn(24, generator=generator)
    workers = Workers(OneBitAdam(warm_up=40, codec=codec), [("w", (24,))], 4)
    w = torch.zeros(24)
    for number in range(300):
        w -= 0.3 * 0.985**number * workers.round([x.T @ (x @ (w - solution)) / 50 for x in inputs])[0]
        if number == 40:
            at_the_warm_ups_end = (w - solution).norm()
    assert (w - solution).norm() < 0.02 * solution.norm()
    assert (w - solution).norm() < 0.2 * at_the_warm_ups_end


@pytest.mark.parametrize(
    "arguments",
    [
        {"warm_up": 0},
        {"warm_up": True},
        {"warm_up": 1.0},
        {"betas": (0.9,)},
        {"betas": (0.9, 1.0)},
        {"betas": (math.nan, 0.9)},
        {"betas": [0.9, 0.999]},
        {"eps": 0.0},
        {"eps": math.inf},
        {"codec": NoCompression()},
        {"codec": ErrorFeedback(TopK(0.1))},
        {"codec": Sign(vote=True)},
        {"codec": QSGD(4)},
        {"codec": Sign},
    ],
    ids=str,
)
def test_arguments_that_cannot_work(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"OneBitAdam\\({next(iter(arguments))}="):
        OneBitAdam(**{"warm_up": 3, **arguments})  # type: ignore[arg-type]


def test_repr_parameters_and_refusals() -> None:
    compression = OneBitAdam(100, codec=TopK(0.1))
    assert eval(repr(compression)) == compression
    assert OneBitAdam(5) == OneBitAdam(warm_up=5, betas=(0.9, 0.999), eps=1e-8, codec=Sign())
    assert compression.for_parameter("bias", (3,)) == compression
    assert compression.optimizer_hint is not None and "SGD" in compression.optimizer_hint
    assert compression.refusal("ring") is not None and OneBitAdam(5, codec=RandomK(0.1)).refusal("ring") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_computes_the_same() -> None:
    compression = OneBitAdam(warm_up=3, codec=SIGN)
    here, there = (Workers(compression, SHAPES, 3) for _ in range(2))
    there.states = [CompressionState(there.layout, torch.device("cuda")) for _ in range(3)]
    for number in range(6):
        grads = gradients(here, number)
        expected = here.round(grads)[0]
        first, *others = there.round([grad.cuda() for grad in grads])
        assert all(torch.equal(first, other) for other in others)
        torch.testing.assert_close(first.cpu(), expected, atol=1e-4, rtol=1e-4)
