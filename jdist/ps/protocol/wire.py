"""Messages as bytes: a msgpack header, then the raw bytes of arrays, in an order that both sides know.

A frame says how many bytes follow, never what they are: sender and receiver agree on the arrays when a shard is restored, and
their sizes are checked before memory is allocated.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import struct
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import msgpack
import numpy as np
from jax import numpy as jnp

from jdist.errors import WireError
from jdist.support.arrays import promote_types

ALIGNED = 64  # bytes; what XLA asks of a buffer that it can use without a copy
CHUNK_BYTES = 1 << 20
_SHARED_BYTES = 1 << 16
MOST_HEADER_BYTES = 16 << 20
_DTYPES = {
    np.dtype(dtype).name: np.dtype(dtype)
    for dtype in ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
    + ("float16", "float32", "float64", "complex64", "complex128", jnp.bfloat16)
}
ROUNDED = np.dtype(jnp.bfloat16)  # what float32 becomes on its way with `wire="bf16"`
_PREFIX = struct.Struct(">4sI")
PREFIX_BYTES = _PREFIX.size
_MAGIC = b"jdp1"


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape and dtype of an array on the wire."""

    shape: tuple[int, ...]
    dtype: str  # its name

    @functools.cached_property
    def numpy(self) -> np.dtype:
        """The dtype itself; refuses one that does not travel."""
        if self.dtype not in _DTYPES:
            raise WireError("arrays of a dtype that cannot be sent")
        return _DTYPES[self.dtype]

    @functools.cached_property
    def size_bytes(self) -> int:
        """Its bytes, without padding."""
        if any(n < 0 for n in self.shape):
            raise WireError("an array of negative size")
        return self.numpy.itemsize * math.prod(self.shape)


def wide(spec: Spec) -> Spec:
    """Returns the spec in which means are taken: floating-point numbers have at least 32 bits."""
    if not jnp.issubdtype(spec.numpy, jnp.inexact):
        return spec
    return Spec(spec.shape, np.dtype(promote_types(spec.numpy, jnp.float32)).name)


def mean_of_integers(values: Sequence[jax.Array]) -> jax.Array:
    """Returns the exact mean of integers that several workers pushed; of flags the first."""
    # Workers push their part of a total times their number, so its mean is a whole number. A value that is the same for all
    # (a count of the caller's, the data of a key) stays unchanged, however large.
    first, n = values[0], len(values)
    if first.dtype == jnp.bool_ or n == 1:
        return first
    signed = jnp.dtype(f"int{first.dtype.itemsize * 8}")
    total = functools.reduce(jnp.add, [(x - first).astype(signed) for x in values])
    return first + (total // n).astype(first.dtype)


def spec_of(x: Any) -> Spec:
    """Returns the spec of an array, or of a struct with shape and dtype."""
    return Spec(tuple(x.shape), np.dtype(x.dtype).name)


class Buffers:
    """Memory for arrays that are about to be received, each aligned for XLA; refuses more than `most_bytes`."""

    # Fill `views` in their order and take `filled()`, or `take` chunks and then `arrays()`.

    def __init__(self, specs: Sequence[Spec], *, most_bytes: int):
        self._specs = tuple(specs)
        sizes = [spec.size_bytes for spec in self._specs]
        self.size_bytes = sum(sizes)
        if self.size_bytes > most_bytes:
            raise WireError(f"a message of {self.size_bytes:,} bytes; at most {most_bytes:,} are taken")
        self._blocks = _blocks(sizes) if sizes else []
        self.views = [block.data for block in self._blocks]
        self._at, self._within = 0, 0

    def take(self, chunk: bytes | memoryview) -> None:
        """Stores the next bytes; refuses more than were expected."""
        chunk = memoryview(chunk)
        while len(chunk):
            while self._at < len(self.views) and self._within == len(self.views[self._at]):
                self._at, self._within = self._at + 1, 0
            if self._at == len(self.views):
                raise WireError(f"more bytes than the {self.size_bytes:,} that were announced")
            view = self.views[self._at]
            n = min(len(chunk), len(view) - self._within)
            view[self._within : self._within + n] = chunk[:n]
            self._within += n
            chunk = chunk[n:]

    def filled(self) -> list[np.ndarray]:
        """Returns the arrays, once all `views` are filled."""
        return [
            block.view(spec.numpy).reshape(spec.shape) for block, spec in zip(self._blocks, self._specs, strict=True)
        ]

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays, once all chunks are taken; refuses if bytes are missing."""
        received = sum(len(v) for v in self.views[: self._at]) + self._within
        if received != self.size_bytes:
            raise WireError(f"{received:,} bytes where {self.size_bytes:,} were announced")
        return self.filled()


def aligned(size_bytes: int) -> np.ndarray:
    """Allocates memory that XLA can use without a copy."""
    block = np.empty(size_bytes + ALIGNED, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block.data)) % ALIGNED  # faster than `block.ctypes.data`
    return block[start : start + size_bytes]


def _blocks(sizes: Sequence[int]) -> list[np.ndarray]:
    """Allocates each array's memory: small ones share a block; a large one has its own, which fits where another was."""
    small = [size if size <= _SHARED_BYTES else 0 for size in sizes]
    ends = list(itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in small))
    shared = aligned(ends[-1] if ends else 0)
    return [
        aligned(size) if size > _SHARED_BYTES else shared[end - -(-size // ALIGNED) * ALIGNED :][:size]
        for size, end in zip(sizes, ends, strict=True)
    ]


def chunks(arrays: Sequence[Any], size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Yields the bytes of arrays in chunks of at most `size`, without copies."""
    for flat in as_bytes(arrays):
        for start in range(0, len(flat), size):
            yield flat[start : start + size]


def as_bytes(arrays: Sequence[Any]) -> list[memoryview]:
    """Returns the bytes of each array, without copies."""
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]


def encode(header: Mapping[str, Any]) -> bytes:
    """Returns a header of plain values as bytes."""
    body: bytes = msgpack.packb(dict(header), use_bin_type=True) or b""
    return _PREFIX.pack(_MAGIC, len(body)) + body


def body_size(prefix: bytes | bytearray | memoryview) -> int:
    """Returns how many bytes of a header follow its first `PREFIX_BYTES`; refuses too many."""
    if len(prefix) < PREFIX_BYTES:
        raise WireError("a message of fewer bytes than its prefix")
    magic, size = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise WireError("not a message of this protocol")
    if size > MOST_HEADER_BYTES:
        raise WireError(f"a header of {size:,} bytes; at most {MOST_HEADER_BYTES:,} are taken")
    return size


def decode(data: bytes | memoryview) -> tuple[dict[str, Any], memoryview]:
    """Returns a header and the bytes after it."""
    view = memoryview(data)
    size = body_size(view[: _PREFIX.size])
    body, rest = view[_PREFIX.size : _PREFIX.size + size], view[_PREFIX.size + size :]
    if len(body) < size:
        raise WireError("a header that is cut off")
    return decode_body(body), rest


def decode_body(body: bytearray | memoryview) -> dict[str, Any]:
    """Returns the header that follows a prefix."""
    try:
        # Lengths inside are bounded by the header's own; nothing is built that is larger than the bytes it came in.
        header = msgpack.unpackb(body, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as exc:
        raise WireError("a header is not msgpack") from exc
    if not isinstance(header, dict):
        raise WireError("a header is not a map")
    return header


def to_plain(value: Any) -> Any:
    """Returns a message as values that msgpack knows; a dataclass as a map of its class's name and what is not a default."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in (tuple, list, frozenset):
        return [to_plain(x) for x in (sorted(value) if kind is frozenset else value)]
    if kind is dict:
        return [[to_plain(key), to_plain(x)] for key, x in value.items()]
    if not dataclasses.is_dataclass(kind):
        return value
    plain = {"is": kind.__name__}
    for name, _, default in _fields(kind):
        if (x := getattr(value, name)) is not default:
            plain[name] = x if type(x) in _ATOMS else to_plain(x)
    return plain


def from_plain(kinds: Mapping[str, type] | type, plain: Any) -> Any:
    """Returns a dataclass of one of `kinds`, by its name, from such values; refuses fields of another name or type."""
    # Fields that name something of the sender's own process are None.
    name = plain.get("is") if isinstance(plain, dict) else None
    kind = (kinds if name == kinds.__name__ else None) if isinstance(kinds, type) else kinds.get(str(name))
    if kind is None:
        raise WireError("unknown message type")
    fields = _fields(kind)
    values, unread = {}, len(plain) - 1
    for name, checked, default in fields:
        if name in plain:
            values[name] = checked(plain[name])
            unread -= 1
        elif default is dataclasses.MISSING:
            raise WireError(f"{kind.__name__} lacks `{name}`")
    if unread:
        unknown = plain.keys() - {"is", *(name for name, _, _ in fields)}
        raise WireError(f"{kind.__name__} has no field {sorted(map(str, unknown))[0][:40]!r}")
    made = object.__new__(kind)  # without `__init__`, which takes twice as long: defaults are attributes of the class
    made.__dict__.update(values)
    return made


_ATOMS = frozenset({int, str, bool, float, bytes, type(None)})
_LOCAL = frozenset({"call", "gradients", "result"})  # names of the sender's own process
_Check = Callable[[Any], Any]


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, _Check, Any], ...]:
    """Returns of each field that travels its name, what checks a value, and its default; MISSING: there must be one."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (f.name, _check(hints[f.name], f"{kind.__name__}.{f.name}"), f.default)
        for f in dataclasses.fields(kind)
        if f.name not in _LOCAL
    )


def _check(hint: Any, where: str) -> _Check:
    """Returns what turns a received value into one of a type, or raises a WireError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        other = _check(next(a for a in args if a is not type(None)), where)
        return lambda value: None if value is None and type(None) in args else other(value)
    if origin is Mapping:
        pairs = _check(tuple[tuple[args], ...], where)  # type: ignore[valid-type]  # its arguments are a map's
        return lambda value: dict(pairs(value))
    if origin in (tuple, frozenset):
        many = origin is frozenset or args[-1] is Ellipsis
        return _check_list(origin, [_check(a, where) for a in args if a is not Ellipsis], many=many, where=where)

    def one(value: Any) -> Any:
        if origin is typing.Literal:
            if not isinstance(value, str) or value not in args:
                raise WireError(f"{where} has an unknown value")
        elif type(value) is not hint:  # not isinstance: True is not an int here
            raise WireError(f"{where} is not of type {hint.__name__}")
        elif hint is int and not -(2**62) < value < 2**62:
            raise WireError(f"{where} is out of range")
        return value

    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value: from_plain(hint, value)
    return one


def _check_list(origin: type, checks: Sequence[_Check], *, many: bool, where: str) -> _Check:
    def checked(value: Any) -> Any:
        if not isinstance(value, list):
            raise WireError(f"{where} is not a list")
        if many:
            return origin(checks[0](x) for x in value)
        if len(value) != len(checks):
            raise WireError(f"{where} has {len(value)} entries, not {len(checks)}")
        return origin(check(x) for check, x in zip(checks, value, strict=True))

    return checked
