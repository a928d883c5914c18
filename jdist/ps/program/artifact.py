"""Packs a function of flat lists of arrays as bytes that any process can run, and unpacks it there.

A received artifact is a program: what it may call outside of XLA is on a list, and it is compiled once per process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist.errors import ArtifactError
from jdist.jaxpr import graph
from jdist.ps.program import trial
from jdist.support.arrays import is_key
from jdist.typing import PyTree

PLATFORMS = ("cpu", "cuda", "tpu")
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))
# What XLA's own operations become: linear algebra, random bits, sorting, sharding. Callbacks into Python are not here.
_ALLOWED = (
    r"lapack_\w+_ffi|cusolver_\w+_ffi|cublas\w*|cu_\w+|hip_\w+|blas_\w+",
    r"LuDecomposition|Qr|Eigh|ProductOfElementaryHouseholderReflectors|Cholesky|TopK|ApproxTopK|PartialReduce",
    r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|xla\.sdy\.\w+",
    r"mhlo\.\w+|stablehlo\.\w+|chlo\.\w+|shape_assertion|dynamic_\w+",
)


def pack(function: Callable[[list[Any]], list[Any]], arguments: Sequence[Any]) -> bytes:
    """Packs a pure function as bytes that any process and platform can run, without source."""
    # For several devices, arguments have shardings: https://docs.jax.dev/en/latest/export/export.html
    closed = jax.make_jaxpr(function)(list(arguments))
    called = [name for name in graph.HOST_CALLS if graph.contains_primitive(closed, name)]
    if called:
        raise ArtifactError(
            f"the step calls the host ({', '.join(called)}), so no other process can run it. Return the value as a metric."
        )
    return bytes(export.export(jax.jit(function), platforms=PLATFORMS)(list(arguments)).serialize())


def name_of(artifact: bytes) -> str:
    """Names an artifact by its content, so that a process that has it already is spared the bytes."""
    return hashlib.sha256(artifact).hexdigest()[:32]


def unpack(
    artifact: bytes, *, donate: Sequence[int] = (), allow: Iterable[str] = ()
) -> Callable[[Sequence[Any]], list[jax.Array]]:
    """Makes a function of a received artifact, compiled at its first call."""
    # It may reuse the buffers of `donate`; `allow` names custom calls besides XLA's own.
    unreadable = "the bytes received are not an exported function, or of another JAX version; run one everywhere."
    if not trial.is_readable(artifact):
        raise ArtifactError(unreadable)
    try:
        exported = export.deserialize(bytearray(artifact))
        text = exported.mlir_module()
    except Exception as exc:  # whatever a reader that trusts its input runs into
        raise ArtifactError(unreadable) from exc
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if platform not in exported.platforms:
        raise ArtifactError(
            f"the function received is for {', '.join(exported.platforms)}; this process is on {platform}. Run the "
            "program and its workers on one platform, for example with JAX_PLATFORMS=cpu."
        )
    allowed = re.compile("|".join([*_ALLOWED, *map(re.escape, allow)]))
    called = set(re.findall(r'custom_call\s*@"?([^\s"(]+)', text))
    refused = sorted(name for name in called if not allowed.fullmatch(name))
    if refused:
        raise ArtifactError(
            f"the function received calls {', '.join(map(repr, refused))}, which this process does not allow. If you trust "
            f"it, start it with --allow-custom-call {refused[0]}."
        )
    if exported.nr_devices > jax.local_device_count():
        raise ArtifactError(
            f"the function received is for {exported.nr_devices} devices; this process has {jax.local_device_count()}."
        )
    arity = len(exported.in_avals)
    is_wide = any(x.dtype in _WIDE for x in [*exported.in_avals, *exported.out_avals])

    def call(*values: Any) -> list[Any]:
        results: Any = exported.call(list(values))
        return results

    shardings: dict[str, Any] = {}
    if exported.nr_devices > 1:
        devices = np.array(jax.local_devices()[: exported.nr_devices])
        named = re.search(
            rf'sdy\.mesh @\w+ = <\["(\w+)"={exported.nr_devices}\]>', text
        )  # JAX wants an axis of the same name
        mesh = Mesh(devices, (named[1] if named else "replica",), axis_types=(AxisType.Auto,))
        shardings["in_shardings"] = exported.in_shardings_jax(mesh)
    compiled: Callable[..., list[jax.Array]] = jax.jit(call, donate_argnums=tuple(donate), **shardings)

    def run(values: Sequence[Any]) -> list[jax.Array]:
        if len(values) != arity:
            raise ArtifactError(f"the function takes {arity} arrays, it was given {len(values)}")
        with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
            return compiled(*values)

    return run


def keeping_64_bits(arrays: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Enables 64-bit types if an array has one; JAX truncates them in a process with these types off."""
    return jax.enable_x64(True) if any(x.dtype in _WIDE for x in arrays) else contextlib.nullcontext()


def sent_of(values: Sequence[Any], batch: tuple[int, int] | None) -> list[Any]:
    """Returns the arguments that travel: all but the `(first, count)` that the worker reads itself."""
    start, count = batch or (0, 0)
    return [*values[:start], *values[start + count :]]


def with_shardings(mesh: Any, arguments: Sequence[Any], num_rows: int) -> list[Any]:
    """Adds shardings for several devices to structs; the first `num_rows` are the batch's and are split by rows."""
    if mesh.size == 1:
        return list(arguments)
    rows, whole = NamedSharding(mesh, PartitionSpec(mesh.axis_names)), NamedSharding(mesh, PartitionSpec())
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if i < num_rows else whole)
        for i, x in enumerate(arguments)
    ]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["impl"])
@dataclasses.dataclass(frozen=True)
class KeyData:
    """A PRNG key, or an array of them, as an argument that travels."""

    data: Any
    impl: Any


def without_keys(tree: PyTree) -> PyTree:
    """Puts `KeyData` in place of each PRNG key of a tree."""
    return jax.tree.map(
        lambda x: KeyData(np.asarray(jax.random.key_data(x)), jax.random.key_impl(x)) if is_key(x) else x, tree
    )


def taking_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of PRNG keys take arguments that `without_keys` returned."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(_key, (args, kwargs), is_leaf=lambda x: isinstance(x, KeyData))
        return function(*args, **kwargs)

    return call


def _key(x: Any) -> Any:
    return jax.random.wrap_key_data(x.data, impl=x.impl) if isinstance(x, KeyData) else x
