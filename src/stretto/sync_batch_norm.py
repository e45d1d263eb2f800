"""BatchNorm over the global batch: every worker normalises with the statistics of all workers' samples.

Worker r holds n_r values of a channel, with mean m_r and M_r = sum (x - m_r)^2. All workers learn all of (n_r, m_r, M_r), and
each combines them (Chan, Golub and LeVeque), without the cancellation that sums of squares would suffer:

    n = sum n_r      m = sum n_r m_r / n      M = sum M_r + n_r (m_r - m)^2      y = (x - m) / sqrt(M/n + eps) * weight + bias

Backward needs two more sums over all workers' samples, with g = dL/dy. L is what `stretto.weight` says: the sum of w_r L_r over
workers (w_r = 1 unless told). The engine multiplies by w_r what leaves worker r, so here its own is divided out again:

    A_r = sum g              B_r = sum g (x - m)                      on each worker
    A   = sum w_r A_r / w    B   = sum w_r B_r / w                    over all, w: this worker's own
    dL/dx = weight / s * (g - A/n - (x - m) B / (n s^2))              s = sqrt(M/n + eps)

The gradients of weight and bias are B_r / s and A_r, this worker's own: `distribute` combines them with all others.

Cost:      per layer, forward: an all-gather of 8 (2C + 1) bytes from each worker; backward: an all-reduce of 16 C bytes. Both are
           waited for; tensors on a GPU are waited for too. In evaluation and in a job of one: nothing, and the bits of BatchNorm.
Invariant: all workers compute the same statistics from the same numbers in the same order, in float64: equal running statistics.
Order:     a layer has a channel of its own for each direction, so its collectives pass those of buckets under way. Its k-th
           forward meets the k-th of every other worker: all must run each layer equally often, forward and backward.
Reference: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979; Ioffe and
           Szegedy, "Batch Normalization", arXiv:1502.03167. torch.nn.SyncBatchNorm computes the same on GPUs, for equal weights.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from stretto.api import current_job, is_initialized
from stretto.collectives.plan import Kind
from stretto.errors import ConfigurationError
from stretto.job import Job

M = TypeVar("M", bound=nn.Module)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of any dimension (N, C, ...) whose statistics in training are those of all workers' samples together.

    Every worker must run the layer equally often; an empty batch takes part and counts as nothing. Without `stretto.init()`,
    and inside `stretto.join`, training is a ConfigurationError. It cannot be differentiated twice.
    """

    _link: _JobTie | None = None
    _where = ""

    @classmethod
    def convert_sync_batchnorm(cls, module: M) -> M:
        """Make every BatchNorm in `module` a SyncBatchNorm, in place: parameters, buffers, hooks and references stay valid."""
        found = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
        for name, layer in found:
            _check_convertible(name, layer)
        for name, layer in found:
            layer.__class__ = cls  # the state is the same; a new object would leave the old one in other people's hands
            cast(SyncBatchNorm, layer)._where = name
        return module

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm({self.num_features}) takes (N, {self.num_features}, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        return self._forward_in_training(input) if self.training else super().forward(input)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model breaks here, into graphs before and after
    def _forward_in_training(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        link = self._linked()
        if link.job.world_size == 1:
            return super().forward(input)
        link.check_nobody_is_absent()
        number = link.next_forward()
        count, mean, variance = link.statistics(input.detach(), number)
        if count < 2:
            raise ValueError(f"SyncBatchNorm needs more than 1 value per channel in training; all workers together have {count}")
        self._track(mean, variance * (count / (count - 1)))
        return cast(Tensor, _Normalise.apply(input, self.weight, self.bias, mean, variance, self.eps, count, link, number))  # type: ignore[no-untyped-call]

    def _linked(self) -> _JobTie:
        """To the job of this thread; a recomputation on a GPU runs in a thread of autograd's, where there is none to be seen."""
        if self._link is None or (is_initialized() and current_job() is not self._link.job):
            self._link = _JobTie(current_job(), self._where)
        return self._link

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
            running.mul_(1.0 - (momentum or 0.0)).add_(new.to(running), alpha=momentum or 0.0)


def _check_convertible(name: str, layer: _BatchNorm) -> None:
    if any(isinstance(parameter, UninitializedParameter) for parameter in layer.parameters()):
        raise ConfigurationError(
            f"BatchNorm {name!r} is lazy and has no shape yet, so there is nothing to convert.\n"
            f"Call the model's forward once, with any input, before convert_sync_batchnorm()."
        )
    if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward):
        raise ConfigurationError(
            f"{type(layer).__name__} {name!r} is a BatchNorm with a forward of its own, which a SyncBatchNorm would not run.\n"
            f"Replace it by hand, by a stretto.SyncBatchNorm and what its forward adds to it."
        )


class _JobTie:
    """A layer's tie to its job: two channels, and how often each was used. A copy of the layer is tied to nothing."""

    def __init__(self, job: Job, where: str) -> None:
        self.job = job
        self._where = where
        self._forwards = self._backwards = 0
        self._forward_channel, self._backward_channel = (0, 0) if job.world_size == 1 else (job.new_channel(), job.new_channel())

    def __str__(self) -> str:
        return f"SyncBatchNorm {self._where!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def check_nobody_is_absent(self) -> None:
        if any(engine.joining for engine in self.job.engines):
            raise ConfigurationError(
                f"{self} inside stretto.join: who has run out of batches does not run it, and the others "
                f"would wait.\nGive all workers as many batches (Sampler(..., drop_last=True)), or use nn.BatchNorm."
            )

    def next_forward(self) -> int:
        self._forwards += 1
        return self._forwards - 1

    def statistics(self, x: Tensor, number: int) -> tuple[int, Tensor, Tensor]:
        """Over all workers' samples: how many per channel, their mean and (biased) variance."""
        rows = torch.zeros(self.job.world_size, 1 + 2 * x.shape[1], dtype=torch.float64, device="cpu")
        rows[self.job.rank] = _own_statistics(x)
        label = f" for forward {number} of {self}"
        self.job.run(Kind.ALL_GATHER, rows, "direct", name=(self._forward_channel, number & 0xFFFFFFFF), label=label)
        counts, means, squares = rows[:, :1], *rows[:, 1:].chunk(2, dim=1)
        count = int(counts.sum())
        mean = (counts * means).sum(0) / max(count, 1)
        variance = (squares + counts * (means - mean).square()).sum(0) / max(count, 1)
        dtype = _computing_dtype(x)
        return count, mean.to(x.device, dtype), variance.to(x.device, dtype)

    def sums(self, own: Tensor, number: int) -> Tensor:
        """Over all workers, each with its weight, in units of this worker's."""
        weight = self.job.weight
        total = own.to("cpu", torch.float64, copy=True)
        total = total * weight if weight else torch.zeros_like(total)  # not times 0: the mean over an empty batch is NaN
        name = (self._backward_channel, self._backwards & 0xFFFFFFFF)
        self._backwards += 1
        label = f" for the backward of forward {number} of {self}"
        self.job.run(Kind.ALL_REDUCE, total, "butterfly", name=name, label=label)
        return (total / weight if weight else torch.zeros_like(total)).to(own)


def _own_statistics(x: Tensor) -> Tensor:
    """(n, mean, sum of squared distances from it) of every channel, on the host."""
    count = x.shape[0] * math.prod(x.shape[2:])
    if count == 0:
        return torch.zeros(1 + 2 * x.shape[1], dtype=torch.float64, device="cpu")
    variance, mean = torch.var_mean(x.to(_computing_dtype(x)), _all_but_channels(x), correction=0)
    host = torch.stack([mean.double(), variance.double() * count]).cpu()
    return torch.cat([torch.tensor([float(count)], dtype=torch.float64, device="cpu"), host.flatten()])


class _Normalise(torch.autograd.Function):
    """y from x and the statistics of all; backward as in the module's text."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float, count: int,
        link: _JobTie, number: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.link, ctx.number = count, link, number
        weight, bias = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        return F.batch_norm(x.to(mean.dtype), mean, variance, weight, bias, training=False, eps=eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        shape = (1, -1, *[1] * (x.dim() - 2))
        centred, g = x.to(mean.dtype) - mean.view(shape), gradient.to(mean.dtype)
        own = torch.stack([g.sum(_all_but_channels(x)), (g * centred).sum(_all_but_channels(x))])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            a, b = ctx.link.sums(own, ctx.number) / ctx.count
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            g_minus = g - a.view(shape) - centred * (b * inverse.square()).view(shape)
            grad_x = (g_minus * scale.view(shape)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (own[1] * inverse).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = own[0].to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None


def _computing_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
