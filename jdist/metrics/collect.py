"""Several metrics as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdist.errors import StepError
from jdist.metrics.metric import Metric
from jdist.support.suggest import did_you_mean

PyTree = Any


def collect(metrics: Mapping[str, Metric]) -> Metric:
    """Combines metrics by name into one, whose contributions, totals and results are dicts.

    `update(inputs, mask=None)`, with a dict that gives each metric its inputs: a tuple, or the input itself where it is
    one; the mask is for all of them.

    Args:
        metrics: metrics by name; a collection is one as well.

    Returns:
        The metric; its result has the results by name, in the order of `metrics`.

    Raises:
        StepError: `metrics` is no such dict; when traced, `inputs` has other names.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> metrics = jdist.metrics.collect({"loss": jdist.metrics.mean(), "accuracy": jdist.metrics.accuracy()})
        >>> logits, labels = jnp.array([[2.0, 1.0], [3.0, 1.0]]), jnp.array([0, 1])
        >>> inputs = {"loss": jnp.array([0.5, 1.5]), "accuracy": (logits, labels)}
        >>> metrics.compute(metrics.update(inputs, mask=jnp.array([True, True])))
        {'loss': 1.0, 'accuracy': 0.5}
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise StepError(
            f"jdist.metrics.collect: `metrics` is {metrics!r:.80}; it must be a dict of metrics by name, such as "
            '{"loss": jdist.metrics.mean()}.'
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not isinstance(metric, Metric):
            raise StepError(
                f"jdist.metrics.collect: {name!r} is {metric!r:.80}; each name is text and each value a metric, made by a call "
                "such as `jdist.metrics.mean()`."
            )
    metrics = dict(metrics)

    def update(inputs: Mapping[str, Any], mask: Any = None) -> PyTree:
        _check_names("`inputs`", inputs, metrics)
        arguments = {name: x if isinstance(x, tuple) else (x,) for name, x in inputs.items()}
        return {name: metric.update(*arguments[name], mask=mask) for name, metric in metrics.items()}

    def add(total: PyTree, contribution: PyTree) -> PyTree:
        _check_names("a contribution", contribution, metrics)
        return {name: metric.add(total[name], contribution[name]) for name, metric in metrics.items()}

    def compute(total: PyTree) -> dict[str, Any]:
        _check_names("a total", total, metrics)
        return {name: metric.compute(total[name]) for name, metric in metrics.items()}

    zero = {name: metric.zero for name, metric in metrics.items()}
    return Metric(name=f"collect({', '.join(metrics)})", update=update, zero=zero, add=add, compute=compute)


def _check_names(what: str, tree: Any, metrics: Mapping[str, Metric]) -> None:
    if not isinstance(tree, Mapping):
        raise StepError(
            f"jdist.metrics.collect: {what} is a {type(tree).__name__}; it must be a dict with the names "
            f"{', '.join(map(repr, metrics))}."
        )
    for name in tree:
        if name not in metrics:
            raise StepError(
                f"jdist.metrics.collect: {what} has {name!r}, of which there is no metric; there are "
                f"{', '.join(map(repr, metrics))}.{did_you_mean(name, metrics)}"
            )
    missing = [name for name in metrics if name not in tree]
    if missing:
        raise StepError(
            f"jdist.metrics.collect: {what} lacks {', '.join(map(repr, missing))}; every metric needs its own in every step."
        )
