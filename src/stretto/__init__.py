"""stretto: data-parallel training for PyTorch on whatever machines there are.

Names are imported when they are first used, so that the launcher and the coordinator start without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.compress.catalogue import COMPRESSIONS
from stretto.torch_backend.registering import tell_torch as _tell_torch

if TYPE_CHECKING:
    from stretto import recipes as recipes
    from stretto.aggregate.all_reduce import AllReduce as AllReduce
    from stretto.aggregate.gossip import Complete as Complete
    from stretto.aggregate.gossip import Exponential as Exponential
    from stretto.aggregate.gossip import Gossip as Gossip
    from stretto.aggregate.gossip import Graph as Graph
    from stretto.aggregate.gossip import OnePeerExponential as OnePeerExponential
    from stretto.aggregate.gossip import RandomMatching as RandomMatching
    from stretto.aggregate.gossip import Ring as Ring
    from stretto.aggregate.gossip import Star as Star
    from stretto.aggregate.gossip import Torus as Torus
    from stretto.aggregate.group_average import GroupAverage as GroupAverage
    from stretto.aggregate.hierarchy import Elastic as Elastic
    from stretto.aggregate.hierarchy import Hierarchy as Hierarchy
    from stretto.aggregate.parameter_server import ParameterServer as ParameterServer
    from stretto.aggregate.shared_memory import SharedMemory as SharedMemory
    from stretto.api import current_job as current_job
    from stretto.api import device as device
    from stretto.api import init as init
    from stretto.api import is_initialized as is_initialized
    from stretto.api import local_rank as local_rank
    from stretto.api import main_first as main_first
    from stretto.api import print as print
    from stretto.api import progress as progress
    from stretto.api import rank as rank
    from stretto.api import shutdown as shutdown
    from stretto.api import world_size as world_size
    from stretto.averaging import consensus as consensus
    from stretto.checkpoint import Resumed as Resumed
    from stretto.checkpoint import load as load
    from stretto.checkpoint import save as save
    from stretto.clipping import clip_grad_norm_ as clip_grad_norm_
    from stretto.collective_api import *  # noqa: F403  # all that is public there is public here
    from stretto.collectives.group import Group as Group
    from stretto.collectives.started import Started as Started
    from stretto.compress.bfloat16 import BFloat16 as BFloat16
    from stretto.compress.by_parameter import ByParameter as ByParameter
    from stretto.compress.demo import DeMo as DeMo
    from stretto.compress.dgc import DGC as DGC
    from stretto.compress.dynamic8 import Dynamic8 as Dynamic8
    from stretto.compress.e3m0 import E3M0 as E3M0
    from stretto.compress.ef21 import EF21 as EF21
    from stretto.compress.error_feedback import ErrorFeedback as ErrorFeedback
    from stretto.compress.float16 import Float16 as Float16
    from stretto.compress.int8 import Int8 as Int8
    from stretto.compress.none import NoCompression as NoCompression
    from stretto.compress.one_bit import OneBit as OneBit
    from stretto.compress.one_bit_adam import OneBitAdam as OneBitAdam
    from stretto.compress.power_sgd import PowerSGD as PowerSGD
    from stretto.compress.qsgd import QSGD as QSGD
    from stretto.compress.random_k import RandomK as RandomK
    from stretto.compress.sign import Sign as Sign
    from stretto.compress.tern_grad import TernGrad as TernGrad
    from stretto.compress.threshold import Threshold as Threshold
    from stretto.compress.top_k import TopK as TopK
    from stretto.compress.warm_up import WarmUp as WarmUp
    from stretto.distributing import distribute as distribute
    from stretto.distributing import gathered as gathered
    from stretto.distributing import join as join
    from stretto.distributing import no_sync as no_sync
    from stretto.distributing import release as release
    from stretto.distributing import save_profile as save_profile
    from stretto.distributing import server_ledgers as server_ledgers
    from stretto.distributing import synchronize as synchronize
    from stretto.distributing import weight as weight
    from stretto.errors import *  # noqa: F403
    from stretto.key_values import declare as declare
    from stretto.key_values import pull as pull
    from stretto.key_values import push as push
    from stretto.launching.spawn import launch as launch
    from stretto.mesh.cutting import tensor_parallel as tensor_parallel
    from stretto.mesh.layout import Layout as Layout
    from stretto.mesh.mesh import Mesh as Mesh
    from stretto.mesh.placements import FeedForward as FeedForward
    from stretto.mesh.placements import Heads as Heads
    from stretto.mesh.placements import LinearMap as LinearMap
    from stretto.mesh.placements import Vocabulary as Vocabulary
    from stretto.mesh.stored_activations import checkpoint_activations as checkpoint_activations
    from stretto.optim.lamb import LAMB as LAMB
    from stretto.optim.lars import LARS as LARS
    from stretto.optim.linear_warmup import LinearWarmUp as LinearWarmUp
    from stretto.parsing import parse as parse
    from stretto.partition.making import pipeline as pipeline
    from stretto.partition.pipelining import Pipeline as Pipeline
    from stretto.partition.schedules import GPipe as GPipe
    from stretto.partition.schedules import Interleaved as Interleaved
    from stretto.partition.schedules import OneForwardOneBackward as OneForwardOneBackward
    from stretto.partition.schedules import PipelineSchedule as PipelineSchedule
    from stretto.partition.schedules import ZeroBubble as ZeroBubble
    from stretto.sampler import Sampler as Sampler
    from stretto.schedule.caramel import Caramel as Caramel
    from stretto.schedule.merged import Merged as Merged
    from stretto.schedule.orders import AfterBackward as AfterBackward
    from stretto.schedule.orders import Buckets as Buckets
    from stretto.schedule.orders import WaitFree as WaitFree
    from stretto.schedule.priority import Priority as Priority
    from stretto.schedule.tictac import Tac as Tac
    from stretto.schedule.tictac import Tic as Tic
    from stretto.shard.replicated import Replicated as Replicated
    from stretto.shard.zero import Zero as Zero
    from stretto.strategy import Strategy as Strategy
    from stretto.sync.asynchronous import Asynchronous as Asynchronous
    from stretto.sync.backup_workers import BackupWorkers as BackupWorkers
    from stretto.sync.delay_compensation import DelayCompensation as DelayCompensation
    from stretto.sync.local_sgd import LocalSGD as LocalSGD
    from stretto.sync.noloco import NoLoCo as NoLoCo
    from stretto.sync.outer import Average as Average
    from stretto.sync.outer import HeavyBall as HeavyBall
    from stretto.sync.outer import Nesterov as Nesterov
    from stretto.sync.outer import SlowMo as SlowMo
    from stretto.sync.soft_sync import SoftSync as SoftSync
    from stretto.sync.stale_synchronous import StaleSynchronous as StaleSynchronous
    from stretto.sync.synchronous import Synchronous as Synchronous
    from stretto.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from stretto.timeouts import Timeouts as Timeouts
    from stretto.torch_backend.options import GroupOptions as GroupOptions

__version__ = "0.1.0"

_HOME = {
    "stretto.api": (
        "current_job", "device", "init", "is_initialized", "local_rank", "main_first", "print", "progress", "rank", "shutdown",
        "world_size",
    ),
    "stretto.aggregate.all_reduce": ("AllReduce",),
    "stretto.aggregate.gossip": (
        "Complete", "Exponential", "Gossip", "Graph", "OnePeerExponential", "RandomMatching", "Ring", "Star", "Torus",
    ),
    "stretto.aggregate.hierarchy": ("Elastic", "Hierarchy"),
    "stretto.aggregate.parameter_server": ("ParameterServer",),
    "stretto.aggregate.group_average": ("GroupAverage",),
    "stretto.aggregate.shared_memory": ("SharedMemory",),
    "stretto.averaging": ("consensus",),
    "stretto.checkpoint": ("Resumed", "load", "save"),
    "stretto.clipping": ("clip_grad_norm_",),
    "stretto.collective_api": (
        "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "gather_object", "group", "recv",
        "reduce", "reduce_scatter", "scatter", "send", "split", "start_all_gather", "start_all_reduce", "start_all_to_all",
        "start_barrier", "start_broadcast", "start_gather", "start_recv", "start_reduce", "start_reduce_scatter",
        "start_scatter", "start_send", "world",
    ),
    "stretto.collectives.group": ("Group",),
    "stretto.collectives.started": ("Started",),
    **{f"stretto.compress.{module}": (name,) for name, module in COMPRESSIONS.items()},
    "stretto.distributing": (
        "distribute", "gathered", "join", "no_sync", "release", "save_profile", "server_ledgers", "synchronize", "weight",
    ),  # fmt: skip
    "stretto.errors": (
        "BackwardFailed", "CheckpointError", "ConfigurationError", "FrameError", "JobError", "MalformedPayload",
        "NonFiniteGradient", "PeerLost", "RankMismatch", "RendezvousError", "SecretError", "StageFailed", "StrettoError",
        "UnreachableError", "WireError", "WireTimeout", "WorkerFailed",
    ),
    "stretto.key_values": ("declare", "pull", "push"),
    "stretto.launching.spawn": ("launch",),
    "stretto.mesh.cutting": ("tensor_parallel",),
    "stretto.mesh.layout": ("Layout",),
    "stretto.mesh.mesh": ("Mesh",),
    "stretto.mesh.placements": ("FeedForward", "Heads", "LinearMap", "Vocabulary"),
    "stretto.mesh.stored_activations": ("checkpoint_activations",),
    "stretto.optim.lamb": ("LAMB",),
    "stretto.optim.lars": ("LARS",),
    "stretto.optim.linear_warmup": ("LinearWarmUp",),
    "stretto.parsing": ("parse",),
    "stretto.partition.making": ("pipeline",),
    "stretto.partition.pipelining": ("Pipeline",),
    "stretto.partition.schedules": ("GPipe", "Interleaved", "OneForwardOneBackward", "PipelineSchedule", "ZeroBubble"),
    "stretto.sampler": ("Sampler",),
    "stretto.schedule.caramel": ("Caramel",),
    "stretto.schedule.merged": ("Merged",),
    "stretto.schedule.orders": ("AfterBackward", "Buckets", "WaitFree"),
    "stretto.schedule.priority": ("Priority",),
    "stretto.schedule.tictac": ("Tac", "Tic"),
    "stretto.shard.replicated": ("Replicated",),
    "stretto.shard.zero": ("Zero",),
    "stretto.strategy": ("Strategy",),
    "stretto.sync_batch_norm": ("SyncBatchNorm",),
    "stretto.sync.asynchronous": ("Asynchronous",),
    "stretto.sync.backup_workers": ("BackupWorkers",),
    "stretto.sync.delay_compensation": ("DelayCompensation",),
    "stretto.sync.local_sgd": ("LocalSGD",),
    "stretto.sync.noloco": ("NoLoCo",),
    "stretto.sync.outer": ("Average", "HeavyBall", "Nesterov", "SlowMo"),
    "stretto.sync.soft_sync": ("SoftSync",),
    "stretto.sync.stale_synchronous": ("StaleSynchronous",),
    "stretto.sync.synchronous": ("Synchronous",),
    "stretto.timeouts": ("Timeouts",),
    "stretto.torch_backend.options": ("GroupOptions",),
}  # fmt: skip

_MODULES = ("recipes",)
__all__ = sorted([*_MODULES, *(name for names in _HOME.values() for name in names)])


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    if name in _MODULES:
        return import_module(f"stretto.{name}")
    raise AttributeError(f"module 'stretto' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_tell_torch()  # of the backend "stretto" of torch.distributed
