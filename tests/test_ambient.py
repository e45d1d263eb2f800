"""What a program sets for all of torch (default device and dtype, inference mode) changes neither our tensors nor our results."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from compress.together import Workers
from laws.strategies import COMPRESSIONS
from stretto.collectives.reduction import Accumulator
from stretto.collectives.run import CollectiveRun
from stretto.compress.codec import Compression
from stretto.distributing import distribute
from stretto.errors import ConfigurationError, WireError
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.testing import run_jobs

SOURCE = Path(stretto.__file__).parent
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "randint", "randperm", "sparse_coo_tensor",
             "tensor", "zeros"}  # fmt: skip


@pytest.mark.parametrize("folder", [".", "collectives", "compress", "compress/kernels", "engine", "plan", "wire"])
def test_every_tensor_of_ours_says_its_device_and_dtype(folder: str) -> None:
    """Without them, a new tensor is whatever the user's program has set as the default, in its thread or everywhere."""
    unsaid = []
    for path in (SOURCE / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch":
                missing = {"device", "dtype"} - {keyword.arg for keyword in node.keywords}
                if node.func.attr in FACTORIES and missing:
                    unsaid.append(
                        f"{folder}/{path.name}:{node.lineno} torch.{node.func.attr} without {' and '.join(sorted(missing))}"
                    )
    assert not unsaid


@pytest.fixture
def all_set() -> Iterator[None]:
    """What is set for the whole process."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        set_as_usual()


def set_as_usual() -> None:
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def settings_of_a_thread() -> AbstractContextManager[Any]:
    return torch.device("meta")


def use_everything(job: Job) -> list[Any]:
    """Every collective, on tensors that are what they are."""
    tensors = {name: torch.ones(3, dtype=getattr(torch, name), device="cpu") for name in ("float32", "bfloat16", "int64")}
    results: list[Any] = [job.all_reduce(tensor, "sum", "auto").tolist() for tensor in tensors.values()]
    results.append(job.all_reduce(tensors["bfloat16"], "mean", "master_worker").tolist())
    results.append(job.broadcast(tensors["float32"], 1).tolist())
    results.append(job.all_gather(tensors["int64"]).tolist())
    results.append(job.gather_object([job.rank, "x"]))
    results.append([stretto.all_reduce(1.5), stretto.all_reduce(2, "sum"), stretto.broadcast(job.rank, 1)])
    job.barrier()
    with stretto.main_first():
        pass
    return results


@pytest.mark.usefixtures("measured_links")
def test_collectives_among_settings_of_the_users(all_set: None) -> None:
    def program(job: Job, ambient: bool) -> list[Any]:
        with settings_of_a_thread() if ambient else nullcontext():
            return use_everything(job)

    assert run_jobs(3, program, True) == run_jobs(3, program, False)


@pytest.mark.parametrize("where", ["inside", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("strided", [False, True])
def test_tensors_of_inference_mode(where: str, dtype: torch.dtype, strided: bool) -> None:
    """torch lets no other thread write to them, and nobody outside that mode; but their values can be combined as any."""

    def program(job: Job) -> list[Any]:
        with torch.inference_mode():
            tensor = torch.full((2, 4), 1.0 + job.rank, dtype=dtype)
            tensor = tensor.t() if strided else tensor
            if where == "inside":
                job.all_reduce(tensor, "mean", "direct")
        if where == "after":
            job.all_reduce(tensor, "mean", "direct")
        assert torch.equal(job.broadcast(torch.ones(2), 0), torch.ones(2))  # nothing is left of that mode
        return [job.all_reduce(tensor.clone(), "sum", algorithm).abs().sum().item() for algorithm in ("ring", "all_to_all")]

    assert run_jobs(3, program) == [[48.0, 48.0]] * 3


def train(job: Job, compress: Compression, models: list[torch.nn.Module], batches: list[Tensor], ambient: bool) -> list[Tensor]:
    model = models[job.rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with settings_of_a_thread() if ambient else nullcontext():
        distribute(model, optimizer, Strategy(aggregate=stretto.AllReduce("ring"), compress=compress), job=job)
        for batch in batches:
            model(batch + job.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def build() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = [torch.nn.Linear(10, 20, dtype=torch.float32), torch.nn.Linear(20, 3, dtype=torch.float32)]
        return torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1])


@pytest.mark.parametrize("compress", [stretto.NoCompression(), stretto.BFloat16()], ids=["plain", "compressed"])
def test_training_among_settings_of_the_users_gives_the_same_bits(compress: Compression, all_set: None) -> None:
    batches = list(torch.linspace(-1, 1, 3 * 4 * 10, dtype=torch.float32, device="cpu").view(3, 4, 10))
    among = run_jobs(2, train, compress, [build(), build()], batches, True)
    set_as_usual()
    usual = run_jobs(2, train, compress, [build(), build()], batches, False)
    assert all(map(torch.equal, among[0], usual[0]))


def test_codecs_among_settings_of_the_users_give_the_same_bits(all_set: None) -> None:
    named = [("1.weight", (20, 10)), ("2.weight", (20,))]
    gradients = [torch.linspace(-1, rank + 1, 220, dtype=torch.float32) for rank in range(2)]
    among = []
    with settings_of_a_thread():
        for compress in COMPRESSIONS:
            workers = Workers(compress, named, 2)
            among.append([workers.round(gradients)[0] for _ in range(3)])
    set_as_usual()
    for compress, ours in zip(COMPRESSIONS, among, strict=True):
        workers = Workers(compress, named, 2)
        assert all(torch.equal(one, workers.round(gradients)[0]) for one in ours), compress


# What cannot travel --------------------------------------------------------------------------------------------------


def expanded() -> Tensor:
    return torch.ones(1).expand(3)


def two_of_them() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


class Wrapped(Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError("nobody should compute with it")


def wrapped() -> Tensor:
    return Tensor._make_subclass(Wrapped, torch.ones(2))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.ones(2, device="meta"), "on the meta device: it has a shape, but no values"),
        (lambda: torch.ones(2, 2).to_sparse(), "of layout torch.sparse_coo.*to_dense"),
        (two_of_them, "of layout torch.jagged"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "of torch.qint8.*dequantize"),
        (wrapped, "of the class Wrapped, which stands for values elsewhere"),
        (lambda: torch.ones(2).numpy(), "all_.*of a ndarray: a tensor.*torch.from_numpy"),
        (lambda: [1.0, 2.0], "of a list: a tensor.*torch.tensor"),
        (lambda: None, "of None: a tensor.*gather_object"),
    ],
    ids=["meta", "sparse", "nested", "quantized", "wrapped", "an array", "a list", "nothing"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.ao.quantization", "ignore:.*quantiz")
def test_what_no_wire_can_read_is_refused_where_it_is_given(make: Any, problem: str) -> None:
    def program(job: Job) -> None:
        for call in (stretto.all_reduce, stretto.broadcast, stretto.all_gather):
            with pytest.raises(ConfigurationError, match=problem.replace("all_.*", ".*")):
                call(make())
        job.barrier()  # nothing was sent, and the thread lives

    run_jobs(2, program)


def test_elements_that_share_a_place_can_be_gathered_and_not_replaced() -> None:
    def program(job: Job) -> None:
        for call in (stretto.all_reduce, stretto.broadcast):
            with pytest.raises(ConfigurationError, match=r"strides \(0,\): several elements share one place.*contiguous"):
                call(expanded())
        assert stretto.all_gather(expanded()).tolist() == [[1.0] * 3] * 2

    run_jobs(2, program)


@pytest.mark.parametrize("where", ["begins", "adds", "sends"])
def test_something_unforeseen_ends_one_collective_on_all_ranks_and_not_the_thread(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On rank 1, which has begun before the others: it adds what arrives, and sends it on, when they come."""
    has_begun = threading.Event()
    raised: list[str] = []
    methods = {"begins": (Accumulator, "__init__"), "adds": (Accumulator, "combine"), "sends": (CollectiveRun, "send")}

    def watched(name: str, method: Any) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            flat = arguments[0] if name == "begins" else self.flat if name == "adds" else self.accumulators[0].flat
            ours = flat.numel() == 13 and flat[0] == 1
            if ours and name == where and (name != "sends" or has_begun.is_set()):
                raised.append(name)
                has_begun.set()
                raise ZeroDivisionError("on purpose")
            if ours and name == "sends":
                has_begun.set()
            return method(self, *arguments, **options)

        return call

    for name, (owner, attribute) in methods.items():
        monkeypatch.setattr(owner, attribute, watched(name, getattr(owner, attribute)))

    def program(job: Job) -> str:
        assert job.rank == 1 or has_begun.wait(30)
        with pytest.raises(WireError) as caught:
            job.all_reduce(torch.full((13,), float(job.rank)), "sum", "ring")
        assert job.all_reduce(torch.ones(5), "sum", "ring").tolist() == [3.0] * 5
        return str(caught.value)

    for text in run_jobs(3, program):
        assert "rank 1 could not carry out all_reduce(float32[13]" in text and "ZeroDivisionError: on purpose" in text
    assert raised == [where] and "Traceback" in caplog.text
