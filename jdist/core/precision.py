"""Mixed precision: computes the forward and backward pass in a 16-bit float, and scales the loss where float16 needs it.

Parameters and everything that is kept stay float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.core.step_state import LossScale, pack, unpack
from jdist.errors import StepError
from jdist.support import checks
from jdist.support.words import did_you_mean
from jdist.typing import PyTree

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
SMALLEST = 1.0  # a smaller scale would mend no overflow that remains at this one
FACTOR = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """A loss scale's rule: doubled after enough finite gradients, halved after a non-finite one."""

    # Source: Micikevicius et al. 2018, Mixed Precision Training (https://arxiv.org/abs/1710.03740),
    # section 3.2; the numbers are those of `keras.optimizers.LossScaleOptimizer`.

    initial: float = 2.0**15  # a power of two, so that scaling rounds nothing
    growth_interval: int = 2000  # steps in a row after which the scale grows

    def __post_init__(self) -> None:
        number = checks.as_real(self.initial)
        if number is None or not SMALLEST <= number <= 2.0**100 or math.frexp(number)[0] != 0.5:
            raise StepError(
                f"`initial_scale` is {self.initial!r}; it must be a power of two between 1 and 2**100, so that scaling rounds "
                "nothing. The usual one is 2.0**15."
            )
        steps = checks.whole_number("growth_interval", self.growth_interval, StepError, unit="steps")
        object.__setattr__(self, "initial", float(number))
        object.__setattr__(self, "growth_interval", steps)

    def begin(self) -> LossScale:
        """Makes the loss scale before the first step, on the host."""
        return LossScale(np.float32(self.initial), np.int32(0), np.int32(0))

    def after(self, now: LossScale, is_finite: jax.Array) -> LossScale:
        """Moves the loss scale after a step; `is_finite` covers the gradients of all replicas."""
        good = now.good_steps + 1
        grows = good >= self.growth_interval
        larger = now.scale * FACTOR
        grown = jnp.where(grows & jnp.isfinite(larger), larger, now.scale)
        fallen = jnp.maximum(now.scale / FACTOR, SMALLEST)
        return LossScale(
            jnp.where(is_finite, grown, fallen),
            jnp.where(is_finite & ~grows, good, 0),
            now.num_skipped + ~is_finite,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision that a step computes in; `jdist.precision` makes it."""

    name: str  # "bf16" or "fp16"
    # entries of the parameters and of the batch that are not cast, by name
    keep: tuple[str, ...] = ()
    loss_scaling: LossScaling | None = None  # None: the loss is not scaled

    @property
    def compute_dtype(self) -> Any:
        """The dtype of the forward and backward pass."""
        return jnp.dtype(_DTYPES[self.name])

    def cast_to_compute(self, tree: PyTree, *, keep: Sequence[str] = ()) -> PyTree:
        """Casts floating-point leaves that are wider to the compute dtype; leaves all others unchanged.

        Example:
            >>> import jdist, jax.numpy as jnp
            >>> half = jdist.precision("bf16", keep=("scale",))
            >>> {k: str(x.dtype) for k, x in half.cast_to_compute({"w": jnp.ones(2), "scale": jnp.ones(2)}).items()}
            {'scale': 'float32', 'w': 'bfloat16'}
        """
        # Integers, bools, complex numbers, PRNG keys, constants (functions of an `equinox.Module`) and
        # entries under a name in `keep` stay. Gradients return in the dtype that a leaf had.
        kept = {*self.keep, *keep}

        def cast(path: Any, x: Any) -> Any:
            dtype = jax.typeof(x).dtype
            wider = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits > 16
            if not wider or not self._names(path).isdisjoint(kept):
                return x
            return jnp.asarray(x).astype(self.compute_dtype)

        return unpack(jax.tree_util.tree_map_with_path(cast, pack(tree)))

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """Casts leaves of the compute dtype to float32; leaves all others unchanged."""

        def cast(x: Any) -> Any:
            is_half = isinstance(x, jax.Array) and x.dtype == self.compute_dtype
            return x.astype(jnp.float32) if is_half else x

        return jax.tree.map(cast, tree)

    def check_names(self, tree: PyTree) -> None:
        """Raises StepError for a name in `keep` that nothing in a tree of state and batch has."""
        if not self.keep:
            return
        there = {name for path, _ in jax.tree_util.tree_leaves_with_path(tree) for name in self._names(path)}
        for name in self.keep:
            if name not in there:
                raise StepError(
                    f"`jdist.precision({self.name!r}, keep=...)` names {name!r}, which is not an entry of state or batch."
                    f"{did_you_mean(name, there)} They have: {', '.join(sorted(there))}."
                )

    @staticmethod
    def _names(path: Any) -> set[str]:
        return {jax.tree_util.keystr((key,), simple=True) for key in path}


def precision(
    name: str, *, keep: Sequence[str] = (), initial_scale: float | None = None, growth_interval: int | None = None
) -> Precision:
    """Makes the precision that a step computes in, for `jdist.distribute(..., precision=...)`.

    The batch reaches the step in the compute dtype, and what `jdist.value_and_grad` differentiates by the
    loss function. What a step computes of the batch elsewhere, such as a metric, is computed from rounded values: `keep` names
    entries that are not to be. Gradients come back in float32 to the parameters, which are float32 throughout, as are the
    optimiser's state, batch statistics, the sums of `jdist.mean`, all-reduces, and the loss, what `has_aux` returns and metrics
    as returned. Integers, bools and keys are never cast, nor are replicated arguments of the step.

    "fp16" scales the loss (Micikevicius et al. 2018): a step with all-reduced gradients that are not finite is left out on all
    replicas alike, and the scale halved; after `growth_interval` finite ones in a row it doubles. What is still not finite
    at scale 1 does what `non_finite` says.

    Args:
        name: "bf16", with the range of float32 and 8 significant bits; or "fp16", with 11 significant bits and a range that
            ends at 65,504.
        keep: names of entries, anywhere in the parameters or the batch, that stay float32: `("target", "BatchNorm_0")`.
        initial_scale: of the loss, a power of two; only with "fp16". None: 2**15.
        growth_interval: number of steps; only with "fp16". None: 2,000.

    Returns:
        A frozen value.

    Raises:
        StepError: a name or value that is not allowed.

    Example:
        >>> import jdist, jax.numpy as jnp, numpy as np
        >>> @jdist.distribute(jdist.one_device(), precision=jdist.precision("bf16"))
        ... def train_step(w, batch):
        ...     def loss_fn(w):
        ...         print("computes in", (w * batch["x"]).dtype)
        ...         return jdist.mean((w * batch["x"] - 2.0) ** 2)
        ...     loss, grad = jdist.value_and_grad(loss_fn)(w)
        ...     return w - 0.1 * grad, {"loss": loss}
        >>> w, metrics = train_step(jnp.float32(0), {"x": np.ones(8, np.float32)})
        computes in bfloat16
        >>> str(w.dtype), str(metrics["loss"].dtype)
        ('float32', 'float32')

    Source: jmp's Policy (https://github.com/google-deepmind/jmp); the methods of the value have its names.
    """
    fix = "Without `precision` a step computes in the dtype of its parameters."
    checks.choice("name", name, _DTYPES, StepError, call="jdist.precision", fix=fix)
    names = (keep,) if isinstance(keep, str) else tuple(keep)
    for each in names:
        if not isinstance(each, str):
            raise StepError(f"`keep` has {each!r}; it must hold names of entries, as text.")
    scaling = {"initial": initial_scale, "growth_interval": growth_interval}
    scaling = {key: value for key, value in scaling.items() if value is not None}
    if name != "fp16" and scaling:
        raise StepError(
            f'`initial_scale` and `growth_interval` are for "fp16". "{name}" has the range of float32: its loss is not scaled.'
        )
    return Precision(name=name, keep=names, loss_scaling=LossScaling(**scaling) if name == "fp16" else None)
