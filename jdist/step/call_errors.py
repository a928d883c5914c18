"""Explanations of why a call of a step failed, where JAX's are hard to read."""

from __future__ import annotations

import re

from jdist.core.strategy import Strategy
from jdist.data.leaves import MASK
from jdist.errors import JDistError, StepError
from jdist.step.signature import Call, Others, Signature
from jdist.support.arrays import check_not_donated
from jdist.typing import PyTree


def explain(
    exc: Exception, strategy: Strategy, signature: Signature, call: Call, state: PyTree, batches: PyTree, others: Others
) -> None:
    """Raises an error that explains `exc` better, or notes with it which argument was taken as what."""
    of_jax = isinstance(exc, RuntimeError | ValueError) and not isinstance(exc, JDistError)
    # A call that fails while it runs has consumed its own state; that is not why it failed.
    if of_jax and any(word in str(exc) for word in ("deleted", "donated")):
        check_not_donated(state)
        signature.check_not_donated(call, batches, others)
    check_axis_bound(exc, strategy.name, strategy)
    missing = re.search(r"Resource axis: (\w+) of .* is not found in mesh", str(exc)) if of_jax else None
    if (
        isinstance(exc, NotImplementedError)
        and "callbacks are only supported in spmd" in str(exc)
        and strategy.model_axes
    ):
        raise StepError(
            f"the step calls the host (`io_callback`, `pure_callback`), and {strategy.name} has the axes "
            f"{', '.join(strategy.model_axes)} inside a replica, where JAX allows only `jax.debug.print` and `.callback`."
        ) from exc
    if missing is not None:
        raise StepError(
            f"{strategy.name} has no mesh axis {missing[1]!r}, over which flax's metadata or a sharding constraint of the step "
            f"divides an array: the mesh has {', '.join(strategy.mesh.shape if strategy.mesh else ())}. Add the axis, "
            f'`jdist.sharded(mesh={{"replica": -1, "{missing[1]}": 1}})`, remove the metadata, '
            "`linen.unbox(variables)`, or map the name to None by flax's axis rules."
        ) from exc
    if (
        isinstance(exc, ValueError)
        and strategy.mesh is not None
        and re.search(r"[Cc]ontext mesh|NamedSharding|sharding_constraint inside jit|`set_mesh`", str(exc))
    ):
        axes = f"the axes {', '.join(strategy.model_axes)}" if strategy.model_axes else "no axes"
        raise StepError(
            f"the step names a mesh of its own, and {strategy.name} runs it over {dict(strategy.mesh.shape)}, with {axes} "
            "inside a replica. Write constraints as `PartitionSpec`s over axes inside a replica, which "
            '`jdist.sharded(mesh={"replica": -1, "model": 2})` makes, or take them out.'
        ) from exc
    if isinstance(exc, KeyError) and exc.args == (MASK,):
        raise StepError(
            f'the step reads batch["{MASK}"], and this batch has none. The mask tells real rows from padding, and '
            "`distribute_dataset` adds it: `for batch in strategy.distribute_dataset(batches):`; or leave it out of the step."
        ) from exc
    if "from different trace level" in str(exc):
        raise StepError(
            "the step uses an nnx object from outside, which it closes over. Pass each object as an argument of the step: "
            "`train_step(model, optimizer, batch)`."
        ) from exc
    if isinstance(exc, TypeError) and re.search(r"grad requires real.*uint32", str(exc)):
        exc.add_note("jdist: if this is the gradient of an nnx module, take `jdist.nnx.value_and_grad`.")
    if not isinstance(exc, RuntimeError):  # a RuntimeError tells of devices and memory
        exc.add_note(signature.taken_as(call, state, batches))


def check_axis_bound(exc: Exception, name: str, strategy: Strategy) -> None:
    """Raises a clearer error where a step names a mesh axis that is not bound; other errors pass."""
    # `name` is the user's strategy; `strategy` traces the step and may be a worker's.
    if not isinstance(exc, NameError) or "unbound axis name" not in str(exc):
        return
    if strategy.is_global_view:
        raise StepError(
            f'{exc}: the step uses a mesh axis, and in the global view (transform="jit") none is bound: the '
            "whole batch is here. Use `jdist.replica_axes()` in the step, None there, or another transform."
        ) from exc
    maker = "one_device" if name == "default" else name
    raise StepError(
        f"{exc}: the step uses a mesh axis that {name} does not bind; it binds {strategy.axes or 'none'}. Name the axis in "
        f"the strategy, `jdist.{maker}(axis=...)`, or use `jdist.replica_axes()` in the step."
    ) from exc
