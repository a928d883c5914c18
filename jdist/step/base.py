"""The interface of every distributed step, whatever its strategy."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax.interpreters import partial_eval

from jdist.core.step_state import unpack
from jdist.core.strategy import Strategy
from jdist.data.leaves import MASK
from jdist.errors import StepError
from jdist.jaxpr import graph
from jdist.step.options import StepOptions, Verify
from jdist.step.outputs import Traced
from jdist.typing import PyTree

IGNORES_MASK = (
    'never reads batch["mask"], and batches of its data are filled up with padding rows, which count like the others. '
    'Give the mask to each mean, `jdist.mean(losses, batch["mask"])`, and to each metric; or choose a global batch that '
    "is a multiple of the number of replicas and divides the number of rows."
)


@dataclass(frozen=True)
class Preview:
    """The results and effects of a call, known before it is made."""

    results: Mapping[str, PyTree]  # by role, of `jax.ShapeDtypeStruct`s
    changes_state: bool
    ignores_mask: bool  # results other than rows one by one depend on a batch's rows, but not on its mask

    @classmethod
    def of(cls, program: Any, traced: Traced, arguments: tuple[PyTree, ...]) -> Preview:
        """Reads a preview off a program that JAX has traced for these arguments."""
        token, state, outputs, *more = program.out_info
        results = dict(zip(traced.output_roles, outputs, strict=True))
        combined = [
            jax.tree.map(lambda _, role=role: role != "examples", tree)
            for role, tree in zip(traced.output_roles, outputs, strict=True)
        ]
        if "state" in traced.returns:
            results = {"state": unpack(state), **results}
        marks = jax.tree.map(lambda _: True, (token, state)), combined, jax.tree.map(lambda _: True, more)
        # The arguments that an effect or a marked result depends on, calls and loops entered.
        _, read = partial_eval.dce_jaxpr(graph.body_of(program.jaxpr), jax.tree.leaves(marks))
        batches = jax.tree.unflatten(jax.tree.structure(arguments), read)[2]
        masked = [batch for batch in batches if isinstance(batch, Mapping) and MASK in batch]
        ignored = any(any(jax.tree.leaves(batch)) and not batch[MASK] for batch in masked)
        return cls(results, traced.changes_state, ignores_mask=ignored)


class Distributed(abc.ABC):
    """A step that `jdist.distribute` made."""

    strategy: Strategy
    options: StepOptions
    __name__: str
    __wrapped__: Callable[..., Any]
    rebind: Callable[[Callable[..., Any]], Any] | None = None  # distributes another function in the same way
    holds_objects: bool = False  # its state is nnx objects; see `NNXStep.over`
    _attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """Binds the step of a method to its object, as `jax.jit` does; each object keeps one, made at the first look."""
        bind = getattr(self.__wrapped__, "__get__", None)
        if instance is None or bind is None or self.rebind is None:
            return self
        if (function := bind(instance, owner)) is self.__wrapped__:
            return self
        if not hasattr(instance, "__dict__"):
            raise StepError(
                f"{self.__name__} is a method of a {type(instance).__name__}: `__slots__` leave no room for the step of each "
                'object. Add "__dict__" to them, or write `jdist.distribute(it.step, strategy)` where the object is there.'
            )
        bound = self.rebind(function)
        vars(instance)[self._attribute or self.__name__] = bound
        return bound

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; called like the function that it was made of."""

    @abc.abstractmethod
    def prepare(self, *args: Any, **kwargs: Any) -> PyTree:
        """Returns the state as a call takes and returns it; runs nothing of the step."""

    def preview(self, *args: Any, **kwargs: Any) -> Preview | None:
        """Describes what a call would do, with nothing compiled; None where only a call shows it."""
        return None

    def count_left_out(self, state: PyTree) -> Any:
        """Counts the steps left out up to `state`, without waiting; None if nothing counts them."""
        # `state` is the result of the newest call or the argument of the next; later calls do not
        # change the count. With several steps a call, and under a parameter server, the entries
        # from the third on say which steps of the newest call were left out.
        return None

    @property
    def newest_token(self) -> jax.Array | None:
        """An array that is ready once the newest call is over, and is never donated; None where other processes compute."""
        return None

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits for every call in flight."""

    def pure(self, args: tuple[Any, ...]) -> tuple[Distributed, tuple[Any, ...]]:
        """Returns the step over arrays that a call with these arguments runs, and its arguments; for most steps itself."""
        return self, args

    def verify_next(self, how: Verify, *, pads: bool = False, tell: Callable[[str], Any] | None = None) -> None:
        """Compares the next call with one replica on the whole batch, if the replicas share a batch."""
        # With `pads`, a later batch will be padded: the step is compared on a padded batch as well.
        # `tell` receives the parts that could not be compared.
        return None
