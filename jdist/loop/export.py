"""A prediction as a serving artefact of `jax.export`, which loads without jdist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.context import outside_scopes, plain_jax
from jdist.core.step_state import pack, unpack
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import BatchAxis, axes_of
from jdist.errors import StepError
from jdist.jaxpr import graph
from jdist.loop.keras_hints import with_hints
from jdist.loop.steps import eval_step_of, strategy_of
from jdist.step.base import Distributed
from jdist.step.tree_checks import check_arrays
from jdist.typing import PyTree

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@with_hints
def export(
    step: Any,
    state: PyTree,
    batch: PyTree,
    *,
    strategy: Strategy | None = None,
    platforms: Sequence[str] | None = None,
) -> bytes:
    """Makes an artefact that computes a step's results for any number of rows, and needs JAX alone.

    The state is part of it, as constants, so it serves one model of up to 2 GB. Other processes load it by
    `jax.export.deserialize(bytearray(artefact)).call(batch)`.

    Args:
        step: `(state, batch) -> results`, as for `jdist.predict`; it runs as one replica.
        state: laid out by the strategy, or on the host.
        batch: an example of a batch, or its shapes: dicts, lists and tuples of arrays [rows, ...], without padding.
        strategy: the one that made the state; None: the step's own, else the current one.
        platforms: where it will run: "cpu", "cuda", "rocm", "tpu"; None: on the platform of this process.

    Returns:
        The bytes of a `jax.export.Exported`.

    Raises:
        StepError: `step` is not such a step, its shapes depend on the number of rows, a leaf has no rows, or the
            batch, the results or the program cannot be serialized.

    Example:
        >>> import jax, jdist, numpy as np
        >>> artefact = jdist.export(lambda w, batch: w * batch["x"], 2.0, {"x": np.arange(5.0)}, strategy=jdist.default())
        >>> jax.export.deserialize(bytearray(artefact)).call({"x": np.arange(3, dtype=np.float32)}).tolist()
        [0.0, 2.0, 4.0]

    Source: `tf.keras.Model.export`; the format is JAX's, https://docs.jax.dev/en/latest/export/export.html.
    """
    if platforms is not None and (isinstance(platforms, str) or not {*platforms} <= {*_PLATFORMS}):
        raise StepError(
            f"jdist.export: `platforms` is {platforms!r}; it must be a list of some of {', '.join(map(repr, _PLATFORMS))}, or "
            "None for the platform of this process."
        )
    strategy = strategy_of(step, strategy, state)
    distributed = eval_step_of(step, strategy, call="jdist.export", returns="examples")
    with outside_scopes(), plain_jax():
        return _serialized(distributed, strategy.fetch(state), batch, platforms)


def _serialized(step: Distributed, state: PyTree, batch: PyTree, platforms: Sequence[str] | None) -> bytes:
    """Exports a step with the state, on the host, as constants."""
    precision = step.options.precision
    state = unpack(jax.tree.map(jnp.asarray, pack(state)))

    def serve(batch: PyTree) -> PyTree:
        results = step.__wrapped__(state, batch if precision is None else precision.cast_to_compute(batch))
        check_arrays(results, "what the step of jdist.export returns", "Return arrays.")
        return results if precision is None else precision.cast_to_output(results)

    function, shapes = jax.jit(serve), _of_any_rows(batch, step.options.batch_axis)
    try:
        if graph.contains_primitive(function.trace(shapes).jaxpr, *graph.HOST_CALLS):
            raise StepError(
                f"jdist.export: {step.__name__} calls back into Python (`jax.debug.print`, `jax.pure_callback`), which an "
                "artefact cannot. Take the call out of the step."
            )
        exported = jax.export.export(function, platforms=platforms)(shapes)
    except (jax.errors.InconclusiveDimensionOperation, TypeError) as exc:
        if isinstance(exc, TypeError) and "_DimExpr" not in str(exc):
            raise
        raise StepError(
            f"jdist.export: {step.__name__} depends on the number of rows: {_first_sentence(exc)} Write shapes by "
            "`x.shape[0]` or -1, without Python's `if`, `int` or `range` over it."
        ) from exc
    try:
        return bytes(exported.serialize())
    except ValueError as exc:
        raise StepError(
            f"jdist.export: the artefact of {step.__name__} cannot be serialized: {_first_sentence(exc)} The batch and the "
            "results must be dicts, lists and tuples of arrays."
        ) from exc


def _of_any_rows(batch: PyTree, batch_axis: BatchAxis) -> PyTree:
    """Makes the shapes of a batch with a symbolic number of rows."""
    arrays = jax.tree.map(lambda x: 0 if isinstance(x, jax.ShapeDtypeStruct) else x, batch)
    check_arrays(arrays, "the batch of jdist.export", "Give arrays, or their shapes.")
    batch = jax.eval_shape(lambda batch: batch, batch)
    (rows,) = jax.export.symbolic_shape("rows")

    def of_any_rows(path: Any, x: Any, axis: int) -> jax.ShapeDtypeStruct:
        if len(x.shape) <= axis:
            raise StepError(
                f"jdist.export: leaf {jax.tree_util.keystr(path) or 'batch'} of `batch` has shape {x.shape} and no axis "
                f"{axis} for its rows. Close over values that all rows share, or put them into the state."
            )
        return jax.ShapeDtypeStruct((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)

    return jax.tree_util.tree_map_with_path(of_any_rows, batch, axes_of(batch, batch_axis))


def _first_sentence(exc: Exception) -> str:
    return str(exc).partition("\n")[0].partition(". ")[0].rstrip(".") + "."
