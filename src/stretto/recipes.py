"""Papers and systems by name, each one composition.

A recipe returns an ordinary `Strategy`: print it to see what the name stands for.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.hierarchy.elastic import Elastic
from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.aggregate.shared_memory.value import SharedMemory
from stretto.compress.codec import Compression
from stretto.compress.demo import DeMo
from stretto.compress.dgc import DGC
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.qsgd import QSGD
from stretto.compress.sign import Sign
from stretto.compress.tern_grad import TernGrad
from stretto.compress.warm_up import WarmUp
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import AfterBackward, Buckets
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous


def ddp(*, bucket_bytes: int = 25 * 1024 * 1024) -> Strategy:
    """PyTorch's DistributedDataParallel: buckets in reverse order of registration, all-reduced as they fill.

    Reference: Li et al., "PyTorch Distributed", VLDB 2020. Departs from it: the all-reduce is stretto's and chosen by size,
    buckets are not rebuilt after the first step, and ranks need not send them in the same order.
    """
    return Strategy(schedule=Buckets(bytes=bucket_bytes))


def data_parallel() -> Strategy:
    """The naive one: when backward has ended, a master gathers all gradients, averages them and sends them back.

    Cost: the master's link carries 2(P-1) times the model. To compare with.
    """
    return Strategy(aggregate=AllReduce("master_worker"), schedule=AfterBackward())


def horovod(*, fusion_bytes: int = 128 * 1024 * 1024) -> Strategy:
    """Horovod: gradients fused into buffers of up to `fusion_bytes`, ring all-reduced.

    Reference: Sergeev and Del Balso, "Horovod", arXiv:1802.05799. Departs from it: what is fused is fixed by the order of
    registration, where Horovod fuses whatever became ready within a cycle (1 ms) on all ranks.
    """
    return Strategy(aggregate=AllReduce("ring"), schedule=Buckets(bytes=fusion_bytes, first_bytes=fusion_bytes))


def mg_wfbp() -> Strategy:
    """MG-WFBP: gradients merged so that the last transfer ends first, by measured times.

    Reference: Shi, Chu and Li, INFOCOM 2019. Departs from it: the best merge plan, where the paper's rule is not always the best.
    """
    return Strategy(schedule=Merged())


def p3(*, slice_bytes: int = 200_000, servers: int | None = None) -> Strategy:
    """P3: gradients in slices, those that the next forward needs first go first and run under it.

    Reference: Jayarajan et al., MLSys 2019; slices of 50,000 parameters, one at a time, pushed to and pulled from `servers`.
    Departs from it: without servers (None, the default) these are all-reduces; with them four slices are under way to all.
    """
    return Strategy(aggregate=_by(servers), schedule=Priority(partition=slice_bytes, credit=slice_bytes))


def bytescheduler(*, partition_bytes: int | None = None, credit_bytes: int | None = None, servers: int | None = None) -> Strategy:
    """ByteScheduler: parts by priority, with a credit, across the iteration barrier, by all-reduce or with `servers`.

    Reference: Peng et al., SOSP 2019. Departs from it: partition and credit are computed from measured times, where they are not
    given, instead of searched for while training.
    """
    return Strategy(aggregate=_by(servers), schedule=Priority(partition=partition_bytes, credit=credit_bytes))


def tictac(*, servers: int | None = None) -> Strategy:
    """TicTac: transfers in the order that lets the next forward run, by measured times (TAC). `servers=4` is its own setting,
    in which pulls from servers are ordered; None orders all-reduces.

    Reference: Hashemi, Jyothi and Campbell, MLSys 2019. Departs from it: a gradient is pushed as soon as it is there, and what
    is pulled is the mean, with which workers step.
    """
    return Strategy(aggregate=_by(servers), schedule=Tac())


def caramel() -> Strategy:
    """Caramel: updates postponed into the next forward, small gradients batched, large ones in parts.

    Reference: Hashemi et al., arXiv:2004.14020. Departs from it: eager autograd keeps its order of computation.
    """
    return Strategy(schedule=Caramel())


def power_sgd(*, rank: int = 4, warm_up: int = 0) -> Strategy:
    """PowerSGD: gradients as products of two thin matrices, what is left over later. Keep the optimizer's momentum.

    Reference: Vogels et al., NeurIPS 2019. `warm_up`: uncompressed rounds first, as in their code.
    """
    return Strategy(compress=_after(warm_up, ErrorFeedback(PowerSGD(rank))))


def dgc(*, fraction: float = 0.001, momentum: float = 0.9, clip: float | None = None) -> Strategy:
    """Deep Gradient Compression: the largest 0.1 %, with momentum corrected for it. For torch.optim.SGD without momentum.

    Reference: Lin et al., ICLR 2018. Warm-up by density as published: 25 %, 6.25 %, 1.6 %, 0.4 %, then `fraction`.
    """
    return Strategy(compress=DGC(fraction, momentum=momentum, clip=clip))


def one_bit_adam(*, warm_up: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> Strategy:
    """1-bit Adam: Adam for `warm_up` rounds, then its variance is frozen and only signs of momentum travel. For
    torch.optim.SGD without momentum.

    Reference: Tang et al., ICML 2021; they warm up for 15 to 25 % of training.
    """
    return Strategy(compress=OneBitAdam(warm_up, betas=betas, eps=eps))


def qsgd(*, bits: int = 4, bucket: int = 512) -> Strategy:
    """QSGD as published: unbiased, each bucket's values to few levels of its Euclidean norm.

    Reference: Alistarh et al., NeurIPS 2017. Departs from it: fields of fixed width instead of Elias coding.
    """
    return Strategy(compress=QSGD(bits, bucket, norm="l2"))


def terngrad(*, clip: float | None = 2.5) -> Strategy:
    """TernGrad: -s, 0 or s for every value, unbiased but for clipping.

    Reference: Wen et al., NeurIPS 2017. Departs from it: a scale per block, and means are encoded anew instead of shared scales.
    """
    return Strategy(compress=TernGrad(clip))


def signsgd_vote() -> Strategy:
    """signSGD with majority vote: one bit up, one bit down; every p.grad is +1 or -1.

    Reference: Bernstein et al., ICML 2018.
    """
    return Strategy(compress=Sign(vote=True))


def demo(*, k: int = 32, chunk: int = 64, decay: float = 0.999) -> Strategy:
    """DeMo: momentum stays local, its strongest frequencies travel, all step by the sign. For torch.optim.SGD without momentum.

    Reference: Peng et al., arXiv:2411.19870.
    """
    return Strategy(compress=DeMo(k, chunk, decay))


def byteps(*, shards: int | None = None, compress: Compression | None = None) -> Strategy:
    """BytePS: servers that sum, each worker steps, what the next forward needs first goes first and runs under it; `compress`,
    with error feedback, on the way there and on the way back.

    Reference: Jiang et al., OSDI 2020; Zhong et al., "Compressed communication for distributed training: adaptive methods and
    system", arXiv:2105.07829, for both ways. Departs from it: parts are of 1 MiB or less where theirs are of 4 MB, so that
    servers have equal shares; 4 MiB of them are under way to each server.
    """
    return Strategy(
        aggregate=ParameterServer(shards),
        compress=NoCompression() if compress is None else compress,
        schedule=Priority(partition=4 << 20),
    )


def downpour(*, shards: int | None = None) -> Strategy:
    """Downpour SGD: servers apply each gradient when it arrives, and nobody waits for anybody.

    Reference: Dean et al., NIPS 2012, with Adagrad. Departs from it: a worker pushes and pulls in every step, as in their
    experiments (n_push = n_fetch = 1); they also allow fewer.
    """
    return Strategy(aggregate=ParameterServer(shards), sync=Asynchronous())


def ssp(bound: int = 3, *, shards: int | None = None) -> Strategy:
    """Stale synchronous parallel: nobody computes more than `bound` steps ahead of the slowest worker.

    Reference: Ho et al., NIPS 2013. Departs from it: updates are steps of an optimizer on the servers, not sums of increments.
    """
    return Strategy(aggregate=ParameterServer(shards), sync=StaleSynchronous(bound))


def softsync(n: int = 1, *, shards: int | None = None) -> Strategy:
    """n-softsync: an update for each P / `n` gradients, whoever they are from, at a rate divided by their staleness.

    Reference: Zhang et al., IJCAI 2016. Departs from it: the rate is divided, not the gradient; for SGD that is the same.
    """
    return Strategy(aggregate=ParameterServer(shards), sync=SoftSync(n))


def backup_workers(b: int = 1, *, shards: int | None = None) -> Strategy:
    """Synchronous steps that do not wait for the `b` slowest workers of each.

    Reference: Chen et al., arXiv:1604.00981.
    """
    return Strategy(aggregate=ParameterServer(shards), sync=BackupWorkers(b))


def mxnet_mpi(*, group_size: int | None = None, shards: int | None = None, elastic: Elastic | None = None) -> Strategy:
    """MXNet-MPI: groups all-reduce inside, and each is one asynchronous client of the servers. `elastic`: its Elastic SGD.

    Reference: Mamidala et al., arXiv:1801.03855. Groups are the workers of a host, or `group_size` that follow each other.
    Departs from it: any optimizer that servers know, and its state is on them.
    """
    return Strategy(
        aggregate=Hierarchy(outer=ParameterServer(shards), group_size=group_size, elastic=elastic), sync=Asynchronous()
    )


def hogwild() -> Strategy:
    """Hogwild!: processes of one host step the same weights in shared memory, without locks. For sparse gradients.

    Reference: Niu et al., NIPS 2011. Departs from it: processes instead of threads, and a backward may read newer weights than
    its forward.
    """
    return Strategy(aggregate=SharedMemory(), sync=Asynchronous())


def _by(servers: int | None) -> AllReduce | ParameterServer:
    return AllReduce() if servers is None else ParameterServer(servers)


def _after(rounds: int, compression: Compression) -> Compression:
    return WarmUp(rounds, compression) if rounds else compression


def by_name() -> dict[str, Callable[..., Strategy]]:
    """Every recipe of this module."""
    every = (
        ddp, data_parallel, horovod, mg_wfbp, p3, bytescheduler, tictac, caramel, power_sgd, dgc, one_bit_adam, qsgd, terngrad,
        signsgd_vote, demo, byteps, downpour, ssp, softsync, backup_workers, mxnet_mpi, hogwild,
    )  # fmt: skip
    return {recipe.__name__: recipe for recipe in every}
