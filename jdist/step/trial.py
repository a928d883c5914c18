"""Trial runs of a step, on copies: without random draws and prints, and unknown to the step's own calls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from jdist.core.context import mesh_of_program
from jdist.core.per_replica import is_per_replica
from jdist.core.sharded_leaf import is_sharded_leaf, whole_on_host
from jdist.core.step_state import pack
from jdist.step.mesh_step import DistributedStep
from jdist.step.non_finite import new_token
from jdist.step.outputs import Traced
from jdist.step.placement import place_batches, replicate
from jdist.step.quiet import draws, prints, quiet, shaken
from jdist.step.signature import Call

PyTree = Any
Run = Callable[[tuple[PyTree, ...]], Any]  # from `(token, state, batches, others)` to `(token, state, outputs)`


@dataclass(frozen=True)
class Result:
    """A leaf of what a step returned, on the host, and its place among all leaves."""

    name: str
    place: int
    value: Any


class Trial:
    """One way to run a step; it is traced at the first run."""

    def __init__(self, step: DistributedStep, call: Call):
        self.step, self._call = step, call
        self.closed: Any = None  # the jaxpr, and its arguments that are rows
        self.batch: Sequence[Any] = ()
        self.state: PyTree = None  # the newest, where the step has left it
        self._run: Run | None = None
        self._treedef: Any = None

    def shaken(self, multiplies: float) -> Trial:
        """Copies the trial, after a run, with errors of rounding in all that is summed; see `quiet.shaken`."""
        trial = copy.copy(self)
        trial._run = self._compile(shaken(quiet(self.closed), multiplies, self.batch))
        return trial

    def run(self, state: PyTree, batches: PyTree, others: PyTree) -> dict[str, Result]:
        """Runs the step; returns the leaves of its results by name."""
        arguments, traced = self.trace(state, batches, others)
        assert self._run is not None  # the trace has made it
        results = self._run(arguments)
        self.state = results[1]
        return {leaf.name: leaf for leaf in named_leaves(results, traced.returns)}

    def trace(self, state: PyTree, batches: PyTree, others: PyTree) -> tuple[tuple[PyTree, ...], Traced]:
        """Traces the step for arguments on the host, if it has not been; returns them in place, and the results' roles."""
        with warnings.catch_warnings():  # the step's own call warns as well
            warnings.simplefilter("ignore")
            strategy, options = self.step.strategy, self.step.options
            others = replicate(strategy, others)
            if strategy.mesh is not None:
                batches = place_batches(strategy, options, batches, self._call.batch_axes)
            state = self.step.backend.adopt_state(strategy, pack(state))
            program, traced = self.step.program(self._call)
            arguments = new_token(strategy, options.steps_per_call), state, batches, others
            if self._run is None:
                closed = program.trace(*arguments)
                self.closed, self._treedef = closed.jaxpr, jax.tree.structure(closed.out_info)
                places = jax.tree.unflatten(jax.tree.structure(arguments), self.closed.jaxpr.invars)
                self.batch = jax.tree.leaves(places[2])
                is_loud = draws(self.closed) or prints(self.closed)
                self._run = self._compile(quiet(self.closed)) if is_loud else lambda arguments: program.run(*arguments)
        return arguments, traced

    def _compile(self, closed: Any) -> Run:
        function = jax.jit(jex.jaxpr_as_fun(closed))

        def run(arguments: tuple[PyTree, ...]) -> Any:
            with mesh_of_program(self.step.strategy):
                return self._treedef.unflatten(function(*jax.tree.leaves(arguments)))

        return run


def named_leaves(results: Any, returns: tuple[str, ...]) -> Iterator[Result]:
    """Lists the leaves of `(token, state, outputs)`, without what each replica has of its own."""
    _, state, outputs, *_ = results
    roles = [role for role in returns if role != "state"]
    trees = [("state", state if "state" in returns else None)]
    names = [role if roles.count(role) == 1 else f"{role}[{i}]" for i, role in enumerate(roles)]
    trees += list(zip(names, outputs, strict=True))
    place = 1 if "state" in returns else 1 + len(jax.tree.leaves(state))
    for role, tree in trees:
        for path, node in jax.tree.leaves_with_path(tree, is_leaf=lambda x: is_per_replica(x) or is_sharded_leaf(x)):
            if not is_per_replica(node) and role != "per_replica":
                yield Result(role + jax.tree_util.keystr(path), place, on_host(node))
            place += len(jax.tree.leaves(node))


def on_host(x: Any) -> Any:
    return whole_on_host(x) if isinstance(x, jax.Array) or is_sharded_leaf(x) else x
