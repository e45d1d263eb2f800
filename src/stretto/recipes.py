"""Papers and systems by name, each one composition.

A recipe returns an ordinary `Strategy`, or a `Layout` of a model that is cut: print it to see what the name stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.gossip import Complete, Gossip, OnePeerExponential, RandomMatching, Ring
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.aggregate.group_average import GroupAverage
from stretto.aggregate.hierarchy.elastic import Elastic
from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.aggregate.shared_memory.value import SharedMemory
from stretto.compress.codec import Compression
from stretto.compress.demo import DeMo
from stretto.compress.dgc import DGC
from stretto.compress.e3m0 import E3M0
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.qsgd import QSGD
from stretto.compress.sign import Sign
from stretto.compress.tern_grad import TernGrad
from stretto.compress.top_k import TopK
from stretto.compress.warm_up import WarmUp
from stretto.errors import ConfigurationError
from stretto.mesh.layout import Layout, Rule
from stretto.mesh.placements import FeedForward, Heads, Vocabulary
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import AfterBackward, Buckets
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac
from stretto.shard.zero import Zero
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.noloco import NoLoCo
from stretto.sync.outer import Nesterov, SlowMo
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous


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


def dpsgd(graph: MixingGraph | None = None) -> Strategy:
    """D-PSGD: after each step models are mixed with those of the neighbours, which travel while the gradient is computed.

    Reference: Lian et al., NIPS 2017. The graph is a ring, as there, unless another is given. Departs from it: any optimizer.
    """
    return Strategy(aggregate=Gossip(Ring() if graph is None else graph))


def adpsgd(graph: MixingGraph | None = None) -> Strategy:
    """AD-PSGD: while a worker computes, its model is averaged with that of one neighbour at a time; nobody waits for anybody.

    Reference: Lian et al., ICML 2018. Everybody is everybody's neighbour, unless another graph is given, and it need not be
    bipartite. Departs from it: any optimizer.
    """
    return Strategy(aggregate=Gossip(Complete() if graph is None else graph), sync=Asynchronous())


def sgp(graph: MixingGraph | None = None) -> Strategy:
    """Stochastic gradient push: after its step a worker sends half of its model to one other worker, another one each time.

    Reference: Assran et al., ICML 2019. The graph is the one-peer exponential one, as there, unless another is given.
    """
    return Strategy(aggregate=Gossip(OnePeerExponential() if graph is None else graph, push_sum=True))


def overlap_sgp(bound: int = 1, graph: MixingGraph | None = None) -> Strategy:
    """Overlap SGP: what is pushed may come `bound` steps late, so that it travels while the next steps compute.

    Reference: Assran et al., ICML 2019.
    """
    return replace(sgp(graph), sync=StaleSynchronous(bound))


def choco_sgd(codec: Compression | None = None, *, graph: MixingGraph | None = None, pull: float = 0.1) -> Strategy:
    """CHOCO-SGD: neighbours keep public copies of each other's models, and send the changes of these, compressed.

    `pull`: how far a worker moves towards its neighbours; the less the codec sends, the smaller.
    Reference: Koloskova et al., ICML 2019 and ICLR 2020, in the order of the latter. Departs from it: the best 5 % of each tensor
    are sent, unless another codec is given, and copies begin with the values that all workers have.
    """
    gossip = Gossip(Ring() if graph is None else graph, pull=pull)
    return Strategy(aggregate=gossip, compress=TopK(0.05) if codec is None else codec)


def wagma(*, size: int = 4, bound: int = 10) -> Strategy:
    """WAGMA-SGD: models averaged in groups of `size` that change each round and wait for nobody; every `bound` rounds, over all.

    Reference: Li et al., IEEE TPDS 2021. Groups of about the square root of the number of workers; a bound of 10 for ResNet-50.
    Departs from it: a slow worker takes fewer steps, instead of being waited for every `bound` rounds.
    """
    return Strategy(aggregate=GroupAverage(size), sync=StaleSynchronous(bound))


def local_sgd(every: int = 16) -> Strategy:
    """Local SGD: each worker trains by itself, and after every `every` steps their weights become the mean of all.

    Reference: Stich, ICLR 2019. Any optimizer, whose state stays each worker's own.
    """
    return Strategy(sync=LocalSGD(every))


def post_local_sgd(start_after: int, *, every: int = 16) -> Strategy:
    """Post-local SGD: `start_after` synchronous steps, then local SGD. Theirs changes where the learning rate first falls.

    Reference: Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020.
    """
    return Strategy(sync=LocalSGD(every, start_after=start_after))


def slowmo(every: int = 12, *, momentum: float = 0.6, lr: float = 1.0) -> Strategy:
    """SlowMo: local SGD with a slow momentum over exchanges, in units of the learning rate; the inner momentum begins anew.

    Reference: Wang et al., ICLR 2020; 12 steps for ImageNet, 48 for WMT, momentum 0.4 to 0.8. Departs from it: over local SGD
    only, where it also has other base algorithms.
    """
    return Strategy(sync=LocalSGD(every, outer=SlowMo(momentum, lr), optimizer_state="reset"))


def diloco(every: int = 100, *, lr: float = 0.7, momentum: float = 0.9, compress: Compression | None = None) -> Strategy:
    """DiLoCo: AdamW in each worker, and Nesterov momentum over what they have come to after every `every` steps. `compress`:
    what becomes of the differences that are exchanged, for instance ErrorFeedback(Int8()).

    Reference: Douillard et al., arXiv:2311.08105; 100 to 500 steps, from a model that has been trained for a while.
    """
    return Strategy(
        sync=LocalSGD(every, outer=Nesterov(lr, momentum)), compress=NoCompression() if compress is None else compress
    )


def noloco(every: int = 50, *, momentum: float = 0.5, lr: float = 0.7, pull: float = 0.7) -> Strategy:
    """NoLoCo: `every` steps alone, then an outer step with one other worker, drawn at random each time. Nobody waits for all.

    Reference: Kolehmainen et al., arXiv:2506.10911, with the values of its code. Departs from it: the model is whole in each
    worker, where they also draw a way through a pipeline for each batch.
    """
    return Strategy(aggregate=Gossip(RandomMatching()), sync=LocalSGD(every, outer=NoLoCo(momentum, lr, pull)))


def moshpit(*, size: int = 4, every: int = 1) -> Strategy:
    """Moshpit SGD: workers on a grid with sides of `size`; models are averaged along one axis of it, then along the next.

    `every`: after so many steps. Reference: Ryabinin et al., NeurIPS 2021. Departs from it: the grid stays what it is, and nobody
    has to look for a group.
    """
    return Strategy(aggregate=GroupAverage(size), sync=Synchronous() if every == 1 else LocalSGD(every))


def streaming_diloco(
    every: int = 100,
    *,
    fragments: int = 4,
    overlap: int | None = None,
    merge: float = 0.5,
    lr: float = 0.4,
    momentum: float = 0.9,
    compress: Compression | None = None,
) -> Strategy:
    """Streaming DiLoCo: the model in fragments, each exchanged once in `every` steps, in the background for `overlap` of them,
    and mixed with what a worker has come to meanwhile. Outer gradients travel in 4 bits, unless another codec is given. Without
    `overlap` it is 5, or as many as there are before the next fragment's turn, every / fragments - 1.

    Reference: Douillard et al., arXiv:2501.18512.
    """
    if overlap is None:
        is_whole = isinstance(every, int) and isinstance(fragments, int) and fragments >= 1
        overlap = max(0, min(5, every // fragments - 1)) if is_whole else 0  # the rest is refused by LocalSGD
    sync = LocalSGD(every, outer=Nesterov(lr, momentum), fragments=fragments, overlap=overlap, merge=merge)
    return Strategy(sync=sync, compress=E3M0() if compress is None else compress)


def zero(stage: int = 2) -> Strategy:
    """ZeRO: optimizer state in slices (stage 1), and gradients (2); each worker steps its slices and gives them to the others.
    With stage 3 parameters are in slices too, and gathered while a module computes with them.

    Reference: Rajbhandari et al., SC 2020. Departs from it: parameters and optimizer state have the dtype they have without it;
    for mixed precision as there, with float32 weights at their owner, write Zero(stage, weights=Float16()).
    """
    return Strategy(shard=Zero(stage))


def zero_r(stage: int = 2, *, buffer_bytes: int = 8 << 20) -> Strategy:
    """ZeRO with ZeRO-R: what is left of memory beside the state. Buffers of a constant size (C_B): two, of `buffer_bytes` and the
    largest parameter that shares one, whatever the model; larger parameters need none. What stays lies in arenas (M_D). Of
    activations keep a slice each (P_a) by `stretto.checkpoint_activations(model, "blocks.*", partition=mesh.group("model"))`.

    Reference: Rajbhandari et al., SC 2020, section 6. Departs from it: arenas are there with every `Zero(stage)`.
    """
    if not isinstance(buffer_bytes, int):
        raise ConfigurationError(
            f"zero_r(buffer_bytes={buffer_bytes!r}): a buffer has a positive whole number of bytes, whatever the model.\n"
            f"Write for instance zero_r(buffer_bytes={8 << 20})."
        )
    return Strategy(schedule=Buckets(bytes=buffer_bytes, first_bytes=min(buffer_bytes, 1 << 20)), shard=Zero(stage))


def hypar_flow() -> Strategy:
    """HyPar-Flow, for the replicas of a pipeline's stages: each stage's gradients are summed among its own replicas, under the
    backward of the last micro-batch. Give it to `stretto.distribute(pipeline.module, optimizer, recipes.hypar_flow())`.

    Reference: Awan et al., ISC 2020. Departs from it: transfers are bounded to a group of small gradients, not one for each
    layer.
    """
    return Strategy(schedule=Buckets(bytes=2 << 20))


def gpipe(*, recompute: bool = True) -> dict[str, Any]:
    """GPipe: all forwards, then all backwards, with activations recomputed. What `stretto.pipeline(model, stages, microbatches,
    **recipes.gpipe())` takes.

    Reference: Huang et al., NeurIPS 2019. Departs from it: statistics of BatchNorm are over micro-batches in training, the
    running ones too, so it is refused with `recompute`.
    """
    return {"schedule": "GPipe()", "recompute": recompute}


def pipedream_flush() -> dict[str, Any]:
    """PipeDream-flush, 1F1B: `stretto.pipeline(model, stages, microbatches, **recipes.pipedream_flush())`.

    Reference: Narayanan et al., ICML 2021. Departs from it: none in the order of work; stages exchange as in `mailbox.py`.
    """
    return {"schedule": "OneForwardOneBackward()"}


def megatron(*, dimension: str = "model", vocabulary: bool = False, batch: str | None = "data") -> Layout:
    """Megatron-LM: attention by heads, feed-forward blocks by inner features, the rest in every worker. A layout, for
    `stretto.tensor_parallel`: of torch's transformer layers, of Hugging Face's GPT-2 and Llama, and of models with their names.

    `vocabulary`: the embedding of words and the map to logits too (by the names that these have), by words.

    Reference: Shoeybi et al., arXiv:1909.08053. Departs from it: logits are gathered for an ordinary cross entropy, and words are
    not padded to a number that divides.
    """
    words = [(name, Vocabulary(dimension)) for name in WORDS] if vocabulary else []
    return Layout(
        (nn.MultiheadAttention, Heads(dimension)),
        *((kind, FeedForward(dimension)) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)),
        *((name, Heads(dimension)) for name in ("**.attn", "**.self_attn")),
        ("**.mlp", FeedForward(dimension)),
        *words,
        batch=batch,
        optional=True,
    )


def mesh_tensorflow(
    *, batch: str | None = "data", heads: str | None = "model", d_ff: str | None = "model", vocab: str | None = "model"
) -> Layout:
    """Mesh-TensorFlow's layout of a Transformer: which of its dimensions is cut over which dimension of the mesh (None: none). A
    layout, for `stretto.tensor_parallel`, of the models that `megatron` knows.

    Reference: Shazeer et al., arXiv:1811.02084. Departs from it: d_model and the length of sequences are not cut.
    """
    rules: list[Rule] = [] if vocab is None else [(name, Vocabulary(vocab)) for name in WORDS]
    if heads is not None:
        rules += [(nn.MultiheadAttention, Heads(heads)), ("**.attn", Heads(heads)), ("**.self_attn", Heads(heads))]
    if d_ff is not None:
        rules += [(kind, FeedForward(d_ff)) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)]
        rules.append(("**.mlp", FeedForward(d_ff)))
    return Layout(*rules, batch=batch, optional=True)


# What embeddings of words and maps to logits are called, in Hugging Face's GPT-2 and Llama, nanoGPT and torch's tutorials.
WORDS = ("**.wte", "**.embed_tokens", "**.tok_embeddings", "**.lm_head")
LAYOUTS: dict[str, Callable[..., Layout]] = {"megatron": megatron, "mesh_tensorflow": mesh_tensorflow}


def _by(servers: int | None) -> AllReduce | ParameterServer:
    return AllReduce() if servers is None else ParameterServer(servers)


def _after(rounds: int, compression: Compression) -> Compression:
    return WarmUp(rounds, compression) if rounds else compression


def by_name() -> dict[str, Callable[..., Strategy]]:
    """Every recipe of this module that is a strategy."""
    every = (
        ddp, data_parallel, horovod, mg_wfbp, p3, bytescheduler, tictac, caramel, power_sgd, dgc, one_bit_adam, qsgd, terngrad,
        signsgd_vote, demo, byteps, downpour, ssp, softsync, backup_workers, mxnet_mpi, hogwild, dpsgd, adpsgd, sgp,
        overlap_sgp, choco_sgd, wagma, moshpit, local_sgd, post_local_sgd, slowmo, diloco, streaming_diloco, noloco,
        zero, zero_r, hypar_flow,
    )  # fmt: skip
    return {recipe.__name__: recipe for recipe in every}
