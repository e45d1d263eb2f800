"""What the engine refuses in the middle of training: each with what was done, why it cannot work, and what to write instead."""

from __future__ import annotations

from torch.optim import Optimizer

from stretto.errors import ConfigurationError


def second_mean(answer: str) -> ConfigurationError:
    return ConfigurationError(
        f"a second backward before optimizer.step(), with {answer}: p.grad already holds the "
        f"mean over all workers, and what is on top of it would go through the exchange together with it, again.\n"
        f"Put all but the last backward into `with stretto.no_sync(model):`, or call optimizer.zero_grad() (with "
        f"set_to_none=True, the default) before the next one if this step is to be left out. (Re-entrant checkpointing "
        f"of the whole model makes a backward of each of its segments: use checkpoint(..., use_reentrant=False).)"
    )


def left_over(model: str) -> ConfigurationError:
    return ConfigurationError(
        f"a backward of {model} ended in an exception, and what it left in p.grad is still there: the next backward would add to "
        f"a part of a gradient.\nCall optimizer.zero_grad() before going on with the next batch."
    )


def step_within_backward(optimizer: Optimizer, model: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__}.step() within backward, in a hook of a parameter of {model}: its gradient is this worker's "
        f"own until backward has ended, so workers would drift apart.\nCall optimizer.step() after loss.backward()."
    )


def step_without_round(optimizer: Optimizer, model: str, num_backwards: int) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__}.step() after {num_backwards} backward passes of {model}, all of them under no_sync: their "
        f"gradients are this worker's own, so workers would drift apart.\n"
        f"Leave the last backward before a step outside no_sync; or, where it cannot be known which is the last, call "
        f"stretto.synchronize(model) before the step. To combine gradients yourself, or to train this worker's model alone for a "
        f"while, give the plain model back first: stretto.release(model)."
    )


def read_too_early(model: str, parameter: str) -> ConfigurationError:
    return ConfigurationError(
        f"a forward of {model} has read {parameter} before it was brought up to date: with cross_barrier=True a parameter is "
        f"updated when the module that it belongs to is called, and this forward read it without calling that module, which it "
        f"did not do in the first steps.\n"
        f"Call stretto.synchronize(model) before such a forward, call the module itself, or write cross_barrier=False. A model "
        f"that is compiled has to be so before it is distributed."
    )


def traced_too_early(model: str) -> ConfigurationError:
    return ConfigurationError(
        f"{model} is traced or transformed (torch.jit.trace, torch.func) while some of its parameters have yet to be updated: "
        f"with cross_barrier=True that happens when a module is called, and in there nothing can be updated.\n"
        f"Call stretto.synchronize(model) before."
    )


def compiled_too_late() -> ConfigurationError:
    return ConfigurationError(
        "torch.compile of a module of a model that was distributed with cross_barrier=True: its parameters are waited for before "
        "every forward, which cannot become part of a graph.\nCompile first: stretto.distribute(torch.compile(model), ...)."
    )


def changed_before_update(shape: tuple[int, ...]) -> ConfigurationError:
    return ConfigurationError(
        f"a parameter of shape {shape} was changed between optimizer.step() and the next forward: with cross_barrier=True it had "
        f"not been updated by that step yet, so the change would come before the update instead of after it.\n"
        f"Call stretto.synchronize(model) after the step and before changing weights by hand (clamping, averaging, pruning)."
    )


def own_gradients(optimizer: Optimizer, model: str) -> str:
    return (
        f"{type(optimizer).__name__}.step() uses gradients of {model} that no backward pass has left there since the last step: "
        f"the program has put them into p.grad itself, and they were not combined. If they differ between workers, so will the "
        f"models.\n"
        f"Combine them before the step, stretto.all_reduce(p.grad), or let loss.backward() make them. A program that combines "
        f"gradients itself needs no distribute(): stretto.release(model). (Said once.)"
    )


def synchronize_in_no_sync(model: str) -> ConfigurationError:
    return ConfigurationError(
        f"synchronize() of {model} inside no_sync, where nothing is combined.\nCall it after the `with` block, before the step."
    )


def synchronize_over_mean(answer: str, rank: int) -> ConfigurationError:
    return ConfigurationError(
        f"synchronize() with {answer}: on rank {rank} p.grad still holds the mean of a former round, which no step "
        f"has used, and what was accumulated on top of it would go through the exchange together with it, again.\n"
        f"Call optimizer.step() or optimizer.zero_grad() (with set_to_none=True, the default) after every synchronize()."
    )


def unknown_optimizer_in_join(optimizer: Optimizer, model: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__} steps parameters of {model} inside join and was not given to distribute(): its state could "
        f"not be made equal on all workers at the end.\n"
        f"Give all of them: stretto.distribute(model, (optimizer, other), strategy)."
    )
