"""XLA's flags, JAX's cache of compiled programs, and a fault of gloo. Imports no JAX by itself."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

# XLA reads XLA_FLAGS once, when it starts.
CPU_DEVICES = "--xla_force_host_platform_device_count"
COMPILED, COMPILED_VARIABLE = "compiled", "JAX_COMPILATION_CACHE_DIR"  # the name of a folder of compiled programs
_MOST_COMPILED_BYTES = 4 * 2**30
_GLOO_RIGHT_SINCE = (0, 12, 0)  # jaxlib; JAX's issues 40830 and 40831


def with_flags(existing: str, flags: Mapping[str, str]) -> str:
    """Sets some flags (dashes included) in XLA_FLAGS; the other flags stay."""
    kept = [flag for flag in existing.split() if flag.partition("=")[0] not in flags]
    return " ".join(kept + [f"{name}={value}" for name, value in flags.items()])


def gloo_scatters_wrongly() -> bool:
    """Returns whether `jax.lax.psum_scatter` may silently return wrong values here."""
    import jax  # here, as XLA_FLAGS are set before it is imported
    import jaxlib.version

    # It also gives up after 30 s. Until jaxlib 0.12 gloo's reduce-scatter overwrites data that it
    # is still sending: of parts of several MiB the end is now and then wrong on the first device of
    # a group, also if all devices of a group belong to one process. Exchange the parts by
    # `all_to_all` and add them up instead, which sends as much. Asked where the axes are bound, so
    # devices are known.
    is_gloo = jax.distributed.is_initialized() and jax.default_backend() == "cpu"
    return is_gloo and jaxlib.version.__version_info__ < _GLOO_RIGHT_SINCE


def bound_compiled(folder: Path) -> None:
    """Empties a folder of compiled programs that has grown too large: most are of programs long changed."""
    if sum(file.stat().st_size for file in folder.glob("*")) > _MOST_COMPILED_BYTES:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def compiled_in(folder: Path, *, is_chief: bool) -> Iterator[None]:
    """Has JAX keep compiled programs in a folder, unless the user has chosen one; all processes of a cluster share it."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue] # not annotated
        yield
        return
    if is_chief:
        bound_compiled(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        if jax.config.jax_compilation_cache_dir == str(folder):  # pyright: ignore[reportAttributeAccessIssue] # not annotated
            jax.config.update("jax_compilation_cache_dir", None)  # else the user has chosen one since
            compilation_cache.reset_cache()
