"""Prints the list in `tf_distribute_2_21_0.txt`; runs in an environment with TensorFlow, of which the tests have no need."""

import inspect
import types
from collections.abc import Iterator

import tensorflow as tf


def public(owner: object) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


def classes_in(module: types.ModuleType) -> Iterator[type]:
    for value in (getattr(module, name) for name in public(module)):
        if inspect.ismodule(value):
            yield from classes_in(value)
        elif inspect.isclass(value):
            yield value


LISTED = set(classes_in(tf.distribute))


def symbols(module: types.ModuleType, path: str) -> Iterator[str]:
    for name in public(module):
        value = getattr(module, name)
        yield f"{path}.{name}"
        if inspect.ismodule(value):
            yield from symbols(value, f"{path}.{name}")
        elif inspect.isclass(value):
            bases = value.__mro__[1:]
            of_python = {m for base in bases if base.__module__ in ("builtins", "enum", "abc") for m in vars(base)}
            for member in public(value):
                if member not in of_python and not any(hasattr(base, member) for base in bases if base in LISTED):
                    yield f"{path}.{name}.{member}"


print(
    f"# Public symbols of tf.distribute in tensorflow-cpu {tf.__version__}; of a class the members that no listed base has."
)
print("\n".join(sorted(set(symbols(tf.distribute, "tf.distribute")))))
