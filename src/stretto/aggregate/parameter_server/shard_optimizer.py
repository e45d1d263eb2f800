"""An optimizer as data: the name of one of torch's classes and its options. No code travels to a server.

A server holds slices of parameters and runs the update there, so the update must treat each element by itself:

    w_i(t+1), s_i(t+1) = U(w_i(t), s_i(t), g_i(t), t, options(t))        for each element i by itself

Then a tensor that was cut anywhere, onto any number of servers, is updated as the whole one would be: with the same bits, if
torch computes each slice in one thread (`tests/aggregate/parameter_server/test_shard_optimizer.py` has every class and many
cuts). `ELEMENTWISE` lists the classes for which that holds, with the options that they read and the state that they keep. Not in
it:

    Adafactor, Muon      read the rows and columns of a matrix, which a slice does not have
    LBFGS                reads all gradients at once, and calls the model again
    SparseAdam           takes sparse gradients, and gradients travel dense
    any subclass         its code is not on the server

`foreach`, `fused`, `capturable` and `differentiable` say how a worker would compute the same numbers, so they stay there: a
server takes the plain loop over tensors. (`fused` rounds otherwise, and depending on where a tensor was cut: after ten steps of
SGD with momentum 6 of 1,000 elements differed.) A rate or another option that is a tensor is read as a number.

The options of a step ride with its gradients, so learning rate schedulers work as ever. `ASGD` and `Rprop` keep a rate in their
state and read the one of this step in a later step, or never: they cannot be asked for another rate for one gradient
(`obeys_rate`). The average that `ASGD` computes stays on the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.errors import ConfigurationError

OptionValue = bool | float | tuple[float, float]
Check = Callable[[Any], bool]
LARGEST: Final = 1e18  # a product of two is below float32's largest, and so is a quotient by 1 - LARGEST_BETA
LARGEST_BETA: Final = 0.9999999  # what is nearer to 1 is 1 in float32, and NAdam divides by the difference


# -- which values an option may have ----------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    """One that no formula of an optimizer makes too large for float32: torch would raise in the middle of an update."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_positive_or_zero(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_number, value))


def _are_betas(value: Any) -> bool:
    return _is_pair(value) and all(0 <= beta <= LARGEST_BETA for beta in value)


def _are_etas(value: Any) -> bool:
    return _is_pair(value) and 0 < value[0] < 1 < value[1]


NONNEGATIVE: Final = (_is_positive_or_zero, f"a number from 0 to {LARGEST:g}")
NUMBER: Final = (_is_number, f"a number of at most {LARGEST:g}")
SHARE: Final = (_is_share, "a number from 0 to 1")
FLAG: Final = (_is_flag, "True or False")
BETAS: Final = (_are_betas, f"two numbers from 0 to {LARGEST_BETA}")
ETAS: Final = (_are_etas, "a number below 1 and one above 1, both positive")
PAIR: Final = (_is_pair, f"two numbers of at most {LARGEST:g}")


class ElementwiseClass(NamedTuple):
    """What a server has to know of one of torch's optimizers."""

    options: Mapping[str, tuple[Check, str]]  # that its step reads: a check, and in words what it asks for
    scalars: Mapping[str, tuple[Check, str]] = {}  # of its state, from the first update on
    vectors: tuple[str, ...] = ()  # of its state, as long as the parameter, from the first update on
    optional: Mapping[str, str] = {}  # an option -> the vector that it asks for, if it is on in the first update
    lazy: tuple[str, ...] = ()  # vectors that come when they are first needed
    obeys_rate: bool = True  # whether `lr` of a step is the rate of this very step

    @property
    def all_vectors(self) -> tuple[str, ...]:
        return (*self.vectors, *self.optional.values(), *self.lazy)


_COMMON: Final = {"lr": NONNEGATIVE, "weight_decay": NONNEGATIVE, "maximize": FLAG}
_ADAM: Final = ElementwiseClass(
    options={**_COMMON, "betas": BETAS, "eps": NONNEGATIVE, "amsgrad": FLAG, "decoupled_weight_decay": FLAG},
    scalars={"step": NONNEGATIVE},
    vectors=("exp_avg", "exp_avg_sq"),
    optional={"amsgrad": "max_exp_avg_sq"},
)

ELEMENTWISE: Final[Mapping[str, ElementwiseClass]] = {
    "SGD": ElementwiseClass(
        options={**_COMMON, "momentum": NONNEGATIVE, "dampening": NUMBER, "nesterov": FLAG},
        lazy=("momentum_buffer",),
    ),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": ElementwiseClass(
        options={**_COMMON, "lr_decay": NONNEGATIVE, "eps": NONNEGATIVE, "initial_accumulator_value": NONNEGATIVE},
        scalars={"step": NONNEGATIVE},
        vectors=("sum",),
    ),
    "Adadelta": ElementwiseClass(
        options={**_COMMON, "rho": SHARE, "eps": NONNEGATIVE},
        scalars={"step": NONNEGATIVE},
        vectors=("square_avg", "acc_delta"),
    ),
    "Adamax": ElementwiseClass(
        options={**_COMMON, "betas": BETAS, "eps": NONNEGATIVE},
        scalars={"step": NONNEGATIVE},
        vectors=("exp_avg", "exp_inf"),
    ),
    "NAdam": ElementwiseClass(
        options={
            **_COMMON,
            "betas": BETAS,
            "eps": NONNEGATIVE,
            "momentum_decay": NONNEGATIVE,
            "decoupled_weight_decay": FLAG,
        },
        scalars={"step": NONNEGATIVE, "mu_product": SHARE},
        vectors=("exp_avg", "exp_avg_sq"),
    ),
    "RAdam": ElementwiseClass(
        options={**_COMMON, "betas": BETAS, "eps": NONNEGATIVE, "decoupled_weight_decay": FLAG},
        scalars={"step": NONNEGATIVE},
        vectors=("exp_avg", "exp_avg_sq"),
    ),
    "RMSprop": ElementwiseClass(
        options={**_COMMON, "alpha": NONNEGATIVE, "eps": NONNEGATIVE, "momentum": NONNEGATIVE, "centered": FLAG},
        scalars={"step": NONNEGATIVE},
        vectors=("square_avg",),
        optional={"momentum": "momentum_buffer", "centered": "grad_avg"},
    ),
    "Rprop": ElementwiseClass(
        options={"lr": NONNEGATIVE, "maximize": FLAG, "etas": ETAS, "step_sizes": PAIR},
        scalars={"step": NONNEGATIVE},
        vectors=("prev", "step_size"),
        obeys_rate=False,
    ),
    "ASGD": ElementwiseClass(
        options={**_COMMON, "lambd": NONNEGATIVE, "alpha": SHARE, "t0": NUMBER},
        scalars={"step": NONNEGATIVE, "eta": NONNEGATIVE, "mu": SHARE},
        vectors=("ax",),
        obeys_rate=False,
    ),
}
COMPUTED_ELSEWHERE: Final = ("foreach", "fused", "capturable", "differentiable")


# -- the optimizer of a job -------------------------------------------------------------------------------------------


class OptimizerSpec(msgspec.Struct, frozen=True):
    """One of torch's element-wise optimizers: the name of its class, and the options it was made with. Checked when it is made
    and when it is decoded."""

    name: str
    options: dict[str, OptionValue]

    def __post_init__(self) -> None:
        if self.name not in ELEMENTWISE:
            raise ConfigurationError(
                f"OptimizerSpec({self.name[:100]!r}): a server runs torch's element-wise optimizers and no others.\n"
                f"Write one of {', '.join(ELEMENTWISE)}."
            )
        if wrong := self.fault_in(self.options) or self._fault_of_torch():
            raise ConfigurationError(f"OptimizerSpec({self.name!r}): {wrong}\nLook at the optimizer that it was made from.")

    def _fault_of_torch(self) -> str | None:
        """What torch finds wrong with options that are good one by one: nesterov without momentum, say."""
        try:
            self.build(nn.Parameter(torch.zeros(1)))
        except ValueError as problem:
            return f"{problem}."
        return None

    @property
    def kind(self) -> ElementwiseClass:
        return ELEMENTWISE[self.name]

    @property
    def obeys_rate(self) -> bool:
        """Whether another learning rate for one gradient changes what this gradient does, and nothing else."""
        return self.kind.obeys_rate

    def fault_in(self, options: Mapping[str, object]) -> str | None:
        """What is wrong with the options of a step, which may have come from anywhere; None if they can be used."""
        for name, value in options.items():
            if name not in self.kind.options:
                return f"the option {str(name)[:100]!r} is not one of {self.name}, which has {', '.join(self.kind.options)}."
            is_good, wanted = self.kind.options[name]
            if not is_good(value):
                return f"{name}={str(value)[:100]} is not {wanted}."
        return None

    def options_of(self, group: Mapping[str, Any]) -> dict[str, OptionValue]:
        """The options of a parameter group as they are now, to ride with its gradients. What schedulers and users note in a
        group, and the step does not read, stays there."""
        options = {name: _plain(group[name]) for name in self.kind.options if name in group}
        if wrong := self.fault_in(options):
            raise ConfigurationError(
                f"{self.name} in a step: {wrong} Servers do not take it.\n"
                f"Look at what sets this option: a scheduler, or the program."
            )
        return options

    def build(self, parameter: nn.Parameter) -> Optimizer:
        """torch's own optimizer for one slice."""
        made_with = {name: _plain(value) for name, value in self.options.items() if name not in self._not_an_argument}
        optimizer: Optimizer = getattr(torch.optim, self.name)([parameter], foreach=False, **made_with)
        return optimizer

    @property
    def _not_an_argument(self) -> tuple[str, ...]:
        return ("decoupled_weight_decay",) if self.name == "AdamW" else ()  # it is what AdamW stands for


def spec_of(optimizer: Optimizer) -> OptimizerSpec:
    """Describe the user's optimizer. Refuses what cannot run on a server."""
    name = type(optimizer).__name__
    if name not in ELEMENTWISE or type(optimizer) is not getattr(torch.optim, name):
        raise ConfigurationError(
            f"{type(optimizer).__module__}.{name} on parameter servers: there the update runs on the servers, which hold slices "
            f"of parameters and get no code from anybody, so it has to be one of torch's own that treat each element by itself"
            f"{_why_not(optimizer)}.\n"
            f"Write torch.optim.{', '.join(ELEMENTWISE)}; or sync=Synchronous(), with which servers only add up gradients and "
            f"each worker steps its own optimizer, whichever it is."
        )
    options = {option: _plain(optimizer.defaults[option]) for option in ELEMENTWISE[name].options if option in optimizer.defaults}
    return OptimizerSpec(name, options)


def _why_not(optimizer: Optimizer) -> str:
    for known in ELEMENTWISE:
        if isinstance(optimizer, getattr(torch.optim, known)):
            return f" (a subclass of {known} may compute something else)"
    return ""


def _plain(value: Any) -> Any:
    """Numbers of any kind and tensors of one element as floats; pairs of them as pairs; what is neither stays as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, Real) else value
