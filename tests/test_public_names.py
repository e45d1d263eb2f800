"""What `import stretto` gives: exactly this."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import stretto
from stretto.compress.catalogue import COMPRESSIONS

NAMES = sorted([
    "AfterBackward", "AllReduce", "Asynchronous", "BackupWorkers", "BackwardFailed", "Buckets", "Caramel", "CheckpointError",
    "ConfigurationError", "DelayCompensation", "Elastic", "FrameError", "SharedMemory", "SoftSync", "StaleSynchronous",
    "Group", "GroupAverage", "GroupOptions", "Hierarchy", "JobError", "LAMB", "LARS", "LinearWarmUp", "LocalSGD",
    "MalformedPayload", "Merged", "NonFiniteGradient", "ParameterServer", "PeerLost",
    "Priority", "RankMismatch", "RendezvousError", "Replicated",
    "Average", "HeavyBall", "Nesterov", "NoLoCo", "SlowMo", "Resumed", "Sampler",
    "SecretError", "Started", "Strategy", "StrettoError", "SyncBatchNorm", "Synchronous", "Tac", "Tic", "Timeouts",
    "UnreachableError", "WaitFree", "WireError", "WireTimeout", "WorkerFailed", "all_gather", "all_reduce", "all_to_all",
    "barrier", "broadcast", "consensus", "current_job", "declare", "pull", "push", "server_ledgers",
    "device", "distribute", "gather", "gathered", "gather_object", "group", "init", "is_initialized", "join", "launch", "load",
    "local_rank", "main_first", "no_sync", "parse", "print", "progress", "rank", "recipes", "recv", "reduce", "reduce_scatter",
    "release", "save", "save_profile", "scatter", "send", "shutdown", "split", "start_all_gather", "start_all_reduce",
    "start_all_to_all", "start_barrier", "start_broadcast", "start_gather", "start_recv", "start_reduce",
    "start_reduce_scatter", "start_scatter", "start_send", "synchronize", "weight", "world", "world_size",
    "Zero", "clip_grad_norm_",
    "Complete", "Exponential", "Gossip", "Graph", "OnePeerExponential", "RandomMatching", "Ring", "Star", "Torus",
    "FeedForward", "Heads", "Layout", "LinearMap", "Mesh", "Vocabulary", "checkpoint_activations", "tensor_parallel",
    "GPipe", "Interleaved", "OneForwardOneBackward", "Pipeline", "PipelineSchedule", "StageFailed", "ZeroBubble", "pipeline",
    *COMPRESSIONS,
])  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert list(stretto.__all__) == sorted(stretto.__all__)
    assert stretto.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(stretto, name)
    assert inspect.getdoc(value), f"stretto.{name} has no docstring"
    assert value.__doc__ is not None  # its own, not one that is inherited
    assert name in dir(stretto)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stretto' has no attribute 'horovod'"):
        stretto.horovod  # noqa: B018


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from stretto import *", names)  # noqa: S102
    assert set(names) - {"__builtins__"} == set(NAMES)


@pytest.mark.parametrize("module", ["stretto", "stretto.errors", "stretto.timeouts", "stretto.launching.detect", "stretto.cli"])
def test_importing_does_not_load_torch(module: str) -> None:
    code = f"import {module}, sys; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"
