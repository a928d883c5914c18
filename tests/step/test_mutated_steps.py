"""`jdist.verify` against steps that are wrong on purpose between one replica and two, and against as many right ones.

A program is a base model, a mutation of its step, the dtype that the model computes in, and an optimiser. No other test
says how many kinds of mistakes verify finds, nor how often it takes a right step for a wrong one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.errors import VerificationError
from jdist.metrics import auc
from tests.by_default import some
from tests.conformance.families import CLASSES, CNN, LSTM, Transformer
from tests.existing_steps.test_existing_steps import load, source, with_options
from tests.toys import TWO

ROWS = 32
TO_FIND, LEAST = 0.975, 0.01  # of the wrong programs; how wrong a program has to be


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(16)(x)))


BASES = {
    "linear": (nn.Dense(CLASSES), (6,)),
    "mlp": (MLP(), (6,)),
    "cnn": (CNN(), (6, 6, 1)),
    "lstm": (LSTM(), (5, 4)),
    "transformer": (Transformer(), (5, 4)),
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "float8": jnp.float8_e4m3fn}
OPTIMISERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(1e-3),
    "momentum": optax.sgd(0.01, momentum=0.9),
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """What a loss or a metric is made of."""

    params: Any
    logits: jax.Array
    losses: jax.Array
    batch: dict[str, jax.Array]

    @property
    def mask(self) -> jax.Array:
        return self.batch["mask"]

    @property
    def real(self) -> jax.Array:
        """The mask as floats of zeros and ones."""
        return self.batch["mask"].astype(jnp.float32)

    @property
    def weight(self) -> jax.Array:
        return self.batch["weight"]

    @property
    def target(self) -> jax.Array:
        return self.batch["target"]

    @property
    def right(self) -> jax.Array:
        return (self.logits.argmax(-1) == self.batch["y"]).astype(jnp.float32)

    @property
    def score(self) -> jax.Array:
        return self.logits[:, 0]


def mean(x: Any, mask: Any = None) -> jax.Array:
    """The mean over all rows, the same on every replica."""
    return jdist.all_reduce(jdist.mean(x, mask))


def total(x: Any) -> Any:
    return jdist.all_reduce(x, "sum")


def pairs(z: jax.Array, others: jax.Array) -> jax.Array:
    first = jdist.replica_id() * len(z)
    return optax.softmax_cross_entropy_with_integer_labels(z @ others.T, first + jnp.arange(len(z)))


Part = Callable[[View], Any]
WRONG_LOSSES: dict[str, Part] = {
    "mean over own real rows": lambda v: (v.losses * v.real).sum() / v.real.sum(),
    "sum in place of a mean": lambda v: v.losses.sum(),
    "divided by the global batch": lambda v: v.losses.sum() / ROWS,
    "compute_average_loss without op=sum": lambda v: jdist.compute_average_loss(v.losses),
    "weighted by own weights": lambda v: (v.losses * v.weight).sum() / v.weight.sum(),
    "mask dropped in one of two means": lambda v: (
        jdist.mean(v.losses, v.mask) + (v.losses * v.real).sum() / v.real.sum()
    ),
    "normalised weights": lambda v: (v.losses * v.weight / v.weight.sum()).sum(),
    "squared mean": lambda v: jdist.mean(v.losses, v.mask) ** 2,
    "exp of a mean": lambda v: jnp.exp(jdist.mean(v.losses, v.weight)),
    "log of a mean": lambda v: jnp.log(jdist.mean(v.losses, v.weight)),
    "root of a mean square": lambda v: jnp.sqrt(jdist.mean(v.losses**2, v.weight)),
    "mean and deviation": lambda v: v.losses.mean() + v.losses.std(),
    "maximum": lambda v: v.losses.max(),
    "smooth maximum": lambda v: jax.nn.logsumexp(v.losses),
    "median": lambda v: jnp.median(v.losses),
    "quantile": lambda v: jnp.quantile(v.losses, 0.8),
    "hardest rows": lambda v: jax.lax.top_k(v.losses, len(v.losses) * 3 // 8)[0].mean(),
    "trimmed mean": lambda v: jnp.sort(v.losses)[1:-2].mean(),
    "over own mean": lambda v: (v.losses / v.losses.mean() * v.weight).mean(),
    "standardised": lambda v: ((v.score - v.score.mean()) / v.score.std() * v.target).mean(),
    "broadcast column": lambda v: ((v.logits[:, :1] - v.target) ** 2).mean(),
    "wrong axis": lambda v: jax.nn.log_softmax(v.logits, 0)[:, 0].mean(),
    "attention over rows": lambda v: (jax.nn.softmax(v.score) * v.losses).sum(),
    "contrastive": lambda v: pairs(v.logits, v.logits).mean(),
    "pairwise ranking": lambda v: jax.nn.relu(
        1 - (v.score[:, None] - v.score[None]) * (v.target[:, None] > v.target)
    ).mean(),
    "decorrelation": lambda v: ((v.logits.T @ v.logits / len(v.logits)) ** 2).sum(),
    "variance": lambda v: v.losses.mean() - v.logits.var(0).sum(),
    "entropy of the mean": lambda v: -jax.scipy.special.entr(jax.nn.softmax(v.logits).mean(0)).sum(),
    "own class balance": lambda v: (v.losses / jnp.bincount(v.batch["y"], length=CLASSES)[v.batch["y"]]).mean(),
    "first row": lambda v: v.losses[0],
    "neighbours": lambda v: ((v.score[1:] - v.score[:-1]) ** 2).sum() / ROWS,
    "running sum": lambda v: (jnp.cumsum(v.losses) * v.weight).mean(),
    "floats that mask": lambda v: (v.losses * (v.batch["keep"] == 1.0)).sum() / (v.batch["keep"] == 1.0).sum(),
    "classes as floats": lambda v: (v.losses * (v.batch["kind"] == 2)).sum() / (v.batch["kind"] == 2).sum(),
    "hidden by -1e9": lambda v: -jax.nn.logsumexp(-v.losses + (1 - v.batch["keep"]) * -1e9),
    "ratio of sums": lambda v: (v.losses * v.weight).sum() / (v.weight * v.target**2).sum(),
    "dice": lambda v: 1 - 2 * (jax.nn.sigmoid(v.score) * v.real).sum() / (jax.nn.sigmoid(v.score) + v.real).sum(),
    "correlation": lambda v: -jnp.corrcoef(v.score, v.target)[0, 1],
    "r squared": lambda v: ((v.score - v.target) ** 2).sum() / ((v.target - v.target.mean()) ** 2).sum(),
    "norm of all rows": lambda v: jnp.linalg.norm(v.score - v.target),
}
RIGHT_LOSSES: dict[str, Part] = {
    "masked mean": lambda v: jdist.mean(v.losses, v.mask),
    "plain mean": lambda v: v.losses.mean(),
    "weighted mean": lambda v: jdist.mean(v.losses, v.weight),
    "two masked means": lambda v: jdist.mean(v.losses, v.mask) + jdist.mean(v.score**2, v.mask),
    "regularised": lambda v: jdist.mean(v.losses, v.mask) + 1e-3 * optax.tree.norm(v.params, squared=True),
    "squared mean": lambda v: mean(v.losses, v.mask) ** 2,
    "exp of a mean": lambda v: jnp.exp(mean(v.losses, v.weight)),
    "root of a mean square": lambda v: jnp.sqrt(mean(v.losses**2, v.weight)),
    "ratio of sums": lambda v: total((v.losses * v.weight).sum()) / total((v.weight * v.target**2).sum()),
    "own mean of all": lambda v: jdist.mean((v.score - mean(v.score)) ** 2, v.weight),
    "standardised": lambda v: jdist.mean((v.score - mean(v.score)) / jnp.sqrt(mean(v.score**2) + 1e-3) * v.target),
    "contrastive": lambda v: pairs(v.logits, jdist.all_gather(v.logits)).mean(),
    "decorrelation": lambda v: (jdist.all_reduce(v.logits.T @ v.logits / len(v.logits)) ** 2).sum(),
    "entropy of the mean": lambda v: -jax.scipy.special.entr(jdist.all_reduce(jax.nn.softmax(v.logits).mean(0))).sum(),
    "hardest rows": lambda v: jax.lax.top_k(jdist.all_gather(v.losses), 12)[0].mean(),
    "median": lambda v: jnp.median(jdist.all_gather(v.losses)),
    "floats that mask": lambda v: jdist.mean(v.losses, v.batch["keep"] == 1.0),
    "classes as floats": lambda v: jdist.mean(v.losses * (v.batch["kind"] == 2)),
    "hidden by -1e9": lambda v: jdist.mean(
        jax.nn.logsumexp(v.logits + (1 - v.batch["keep"][:, None]) * -1e9, -1), v.real
    ),
    "focal": lambda v: jdist.mean((1 - jnp.exp(-v.losses)) ** 2 * v.losses, v.mask),
    "huber": lambda v: jdist.mean(optax.huber_loss(v.score, v.target), v.mask),
    "hinge": lambda v: jdist.mean(jax.nn.relu(1 - v.score * jnp.sign(v.target)), v.weight),
    "smoothed labels": lambda v: jdist.mean(v.losses * 0.9 - jax.nn.log_softmax(v.logits).mean(-1) * 0.1, v.mask),
    "chosen row by row": lambda v: jnp.where(v.losses > 1, v.losses, v.losses**2).mean(),
}
WRONG_METRICS: dict[str, Part] = {
    "maximum": lambda v: v.losses.max(),
    "minimum": lambda v: v.score.min(),
    "where the maximum is": lambda v: v.losses.argmax().astype(jnp.float32),
    "count": lambda v: v.real.sum(),
    "right answers": lambda v: v.right.sum(),
    "sum": lambda v: v.losses.sum(),
    "deviation": lambda v: v.losses.std(),
    "median": lambda v: jnp.median(v.losses),
    "quantile": lambda v: jnp.quantile(v.losses * v.target, 0.9),
    "precision": lambda v: (v.right * v.real).sum() / (v.real * v.weight).sum(),
    "perplexity": lambda v: jnp.exp(jdist.mean(v.losses, v.weight)),
    "r squared": lambda v: 1 - ((v.score - v.target) ** 2).sum() / ((v.target - v.target.mean()) ** 2).sum(),
    "correlation": lambda v: jnp.corrcoef(v.score, v.target)[0, 1],
    "norm": lambda v: jnp.linalg.norm(v.logits),
    "auc by pairs": lambda v: ((v.score[:, None] > v.score) & (v.target[:, None] > v.target)).mean(),
    "different labels": lambda v: jnp.sum(jnp.diff(jnp.sort(v.batch["kind"] * 10 + v.batch["y"])) != 0) * 1.0,
    "first row": lambda v: v.losses[0],
}
RIGHT_METRICS: dict[str, Part] = {
    "maximum": lambda v: jdist.all_reduce(v.losses.max(), "max"),
    "right answers": lambda v: total(v.right.sum()),
    "accuracy": lambda v: jdist.mean(v.right, v.mask),
    "perplexity": lambda v: jnp.exp(mean(v.losses, v.weight)),
    "precision": lambda v: total((v.right * v.real).sum()) / total((v.real * v.weight).sum()),
    "norm": lambda v: jnp.sqrt(total((v.logits**2).sum())),
    "norm of parameters": lambda v: optax.tree.norm(v.params),
    "auc": lambda v: auc().update(v.score, v.target > 0, mask=v.mask),
}


def from_state(name: str) -> Callable[..., Any]:
    """The mutations of what a step does with its gradients, and of what else it keeps."""

    def step(loss_fn: Any, state: Any, batch: Any, tx: Any) -> Any:
        of_all = functools.partial(jdist.value_and_grad, op="sum" if name == "op=sum of a mean" else "mean")
        gradient: Any = jax.value_and_grad if name in ("jax.grad", "clipped by own norm") else of_all
        (loss, view), grads = gradient(loss_fn, has_aux=True)(state["params"])
        if name == "clipped by own norm":
            clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.05 / optax.global_norm(grads)), grads)
            grads = jdist.all_reduce(clipped, "mean")
        if name == "summed again":
            grads = jdist.all_reduce(grads, "sum")
        if name == "scaled by the replicas":
            grads = jax.tree.map(lambda g: g * jdist.num_replicas(), grads)
        if name == "steered by own loss":
            grads = jax.tree.map(lambda g: g * jdist.all_reduce(view.losses.max()), grads)
        seen = {
            "counts own rows": lambda: state["seen"] + jdist.all_reduce(batch["mask"].sum() * 1.0, "mean"),
            "maximum of means": lambda: jdist.all_reduce(jnp.maximum(state["seen"], view.losses.mean()), "max"),
            "average of maxima": lambda: 0.9 * state["seen"] + 0.1 * jdist.all_reduce(view.losses.max(), "mean"),
            "average of deviations": lambda: 0.9 * state["seen"] + 0.1 * jdist.all_reduce(view.score.std(), "mean"),
            "counts all rows": lambda: state["seen"] + total(batch["mask"].sum() * 1.0),
            "average of means": lambda: 0.9 * state["seen"] + 0.1 * mean(view.losses, view.mask),
        }.get(name, lambda: state["seen"])()
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt, "seen": seen}
        return new, loss, view

    return step


WRONG_STEPS = (
    *("op=sum of a mean", "jax.grad", "clipped by own norm", "summed again", "scaled by the replicas"),
    *("steered by own loss", "counts own rows", "maximum of means", "average of maxima", "average of deviations"),
)
RIGHT_STEPS = ("plain", "counts all rows", "average of means")


@dataclass(frozen=True)
class Program:
    """A step to verify."""

    base: str
    where: str
    mutation: str
    dtype: str
    optimiser: str
    part: Part | None

    def __str__(self) -> str:
        return f"{self.where}, {self.mutation}, {self.base}, {self.dtype}, {self.optimiser}"


# The base, dtype and optimiser of a program; the slow bases and the coarse dtypes with few others.
COMBINATIONS = [
    *itertools.product(["linear", "mlp"], ["float32"], OPTIMISERS),
    *itertools.product(["linear", "mlp"], ["bfloat16", "float16", "float8"], ["sgd", "adamw"]),
    *itertools.product(["cnn"], ["float32", "bfloat16"], ["sgd"]),
    *itertools.product(["lstm", "transformer"], ["float32"], ["adamw"]),
]


def programs(
    losses: dict[str, Part], metrics: dict[str, Part], steps: tuple[str, ...], count: int
) -> Iterator[Program]:
    """Goes round all mutations, each time with another combination."""
    parts = [("loss", name, part) for name, part in losses.items()]
    parts += [("metric", name, part) for name, part in metrics.items()] + [("step", name, None) for name in steps]
    drawn = [random.Random(i).sample(COMBINATIONS, len(COMBINATIONS)) for i in range(len(parts))]
    for i in range(count):
        where, mutation, part = parts[i % len(parts)]
        base, dtype, optimiser = drawn[i % len(parts)][i // len(parts)]
        yield Program(base, where, mutation, dtype, optimiser, part)


WRONG = list(programs(WRONG_LOSSES, WRONG_METRICS, WRONG_STEPS, 200))
RIGHT = list(programs(RIGHT_LOSSES, RIGHT_METRICS, RIGHT_STEPS, 200))


def rounded(x: Any, dtype: str) -> Any:
    """Lets what follows compute in a dtype; in 8 bits values are stored alone."""
    if dtype == "float8":
        return x + jax.lax.stop_gradient(x.astype(jnp.float8_e4m3fn).astype(x.dtype) - x)
    return x.astype(DTYPES[dtype])


def make_step(program: Program) -> Callable[..., Any]:
    model, _ = BASES[program.base]

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            cast = jax.tree.map(lambda p: rounded(p, program.dtype), params)
            variables = {"params": cast, **state["extra"]}
            logits, _ = model.apply(variables, rounded(batch["x"], program.dtype), mutable=list(state["extra"]))
            logits = logits.astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            view = View(params, logits, losses, batch)
            part = program.part if program.where == "loss" and program.part else RIGHT_LOSSES["masked mean"]
            return part(view), view

        name = program.mutation if program.where == "step" else "plain"
        new, loss, view = from_state(name)(loss_fn, state, batch, OPTIMISERS[program.optimiser])
        metrics = {"loss": loss}
        if program.where == "metric" and program.part:
            metrics["metric"] = program.part(view)
        return new, metrics

    return train_step


def state_and_batch(program: Program, seed: int) -> tuple[Any, Any]:
    model, shape = BASES[program.base]
    rng = np.random.default_rng(seed)
    unlike = np.where(np.arange(ROWS) < ROWS // 2, 1.0, 2.0)  # as the two replicas' rows are
    batch = {
        "x": (unlike.reshape(-1, *[1] * len(shape)) * rng.normal(size=(ROWS, *shape))).astype(np.float32),
        "y": rng.integers(0, CLASSES, ROWS),
        "target": rng.normal(size=ROWS).astype(np.float32),
        "weight": (unlike**2 * rng.uniform(0, 1, ROWS)).astype(np.float32),
        "keep": (rng.uniform(size=ROWS) < np.where(np.arange(ROWS) < ROWS // 2, 0.8, 0.4)).astype(np.float32),
        "kind": rng.integers(0, 4, ROWS).astype(np.float32),
        "mask": np.arange(ROWS) < ROWS - 6,
    }
    variables = dict(model.init(jax.random.key(seed), batch["x"][:2]))
    params = variables.pop("params")
    opt = OPTIMISERS[program.optimiser].init(params)
    return {"params": params, "extra": variables, "opt": opt, "seen": jnp.float32(1.0)}, batch


def verified(program: Program) -> jdist.Verification:
    state, batch = state_and_batch(program, seed=11)
    step = jdist.distribute(make_step(program), TWO, check_replicas=0, non_finite="apply")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jdist.verify(step, state, batch)


def is_wrong(program: Program) -> bool:
    """Whether one replica and two differ by enough, as plain calls of the step in float32 and SGD show."""
    plain = dataclasses.replace(program, dtype="float32", optimiser="sgd")
    state, batch = state_and_batch(plain, seed=11)
    results = []
    for strategy in (jdist.one_device(), TWO):
        step = jdist.distribute(make_step(plain), strategy, check_replicas=0, donate=False, non_finite="apply")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            new, metrics = step(state, batch)
        before = jax.tree.leaves((state["params"], state["seen"], jax.tree.map(jnp.zeros_like, metrics)))
        after = jax.tree.leaves((new["params"], new["seen"], metrics))
        results.append([np.ravel(np.float64(b) - np.float64(a)) for a, b in zip(before, after, strict=True)])
    return any(np.linalg.norm(a - b) >= LEAST * np.linalg.norm(a) > 1e-6 for a, b in zip(*results, strict=True))


def is_named(program: Program) -> bool:
    """Whether verify names a wrong program, which is shown to be wrong by enough."""
    found = verified(program)
    if max((each.relative for each in found.differences), default=0) < LEAST:
        assert is_wrong(program), f"{program} is not wrong"
    return not found.ok


def test_some_wrong_steps_are_named_and_some_right_ones_are_not() -> None:
    for program in WRONG[3::48]:
        assert is_named(program), program
    for program in RIGHT[3::48]:
        found = verified(program)
        assert found.ok, f"{program}: {found}"


def test_the_programs_are_many_and_of_many_kinds() -> None:
    for made in (WRONG, RIGHT):
        assert len(set(map(str, made))) == len(made) == 200
        for name, all_of_them in (("base", BASES), ("dtype", DTYPES), ("optimiser", OPTIMISERS)):
            assert {getattr(program, name) for program in made} == set(all_of_them)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_nearly_all_wrong_steps_are_named() -> None:
    missed = [str(program) for program in cleared(WRONG) if not is_named(program)]
    assert len(missed) <= (1 - TO_FIND) * len(WRONG), missed


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_no_right_step_is_warned_of() -> None:
    warned = [f"{program}: {found}" for program in cleared(RIGHT) if not (found := verified(program)).ok]
    assert not warned, warned


def cleared(programs: list[Program]) -> Iterator[Program]:
    """Forgets the compiled programs now and then."""
    for i, program in enumerate(programs):
        if i % 20 == 19:
            jax.clear_caches()
        yield program


# Programs that people have, as they are under jdist, whose first mean becomes something else.
EXISTING = (
    *("flax_train_state", "raw_optax", "params_and_opt_state", "norm_of_updated", "keyword_argument", "equinox_filter"),
    *("key_argument", "rng_second", "static_argument", "nnx_mutable"),
)
IN_PLACE_OF_MEANS = ("sum", "std", "jax.grad")  # no maximum: of rows that are alike it is their mean


def run_existing(name: str, mutation: str | None) -> None:
    text = source(name, "after")
    if mutation == "jax.grad":
        text, count = re.subn(r"jdist\.(nnx\.)?value_and_grad", "own_value_and_grad", text)
        assert count
    elif mutation is not None:
        text, count = re.subn(
            r"(?<=jnp\.)mean\(|(?<=\.)mean\(\)", lambda m: m[0].replace("mean", mutation), text, count=1
        )
        assert count
    verifying = with_options({"verify": "strict", "check_replicas": 0})
    module = load(name, text, jdist=verifying, own_value_and_grad=own_value_and_grad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.main(TWO)


def own_value_and_grad(*args: Any, using: Any = None, **kwargs: Any) -> Any:
    is_nnx = using is None and "model" in args[0].__code__.co_varnames[:1]
    return (using or (nnx.value_and_grad if is_nnx else jax.value_and_grad))(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "mutation"), some([(n, m) for n in EXISTING for m in IN_PLACE_OF_MEANS], [("raw_optax", "std")])
)
def test_an_existing_program_that_is_changed_is_named(name: str, mutation: str) -> None:
    with pytest.raises(VerificationError, match="leaves differ"):
        run_existing(name, mutation)


@pytest.mark.parametrize("name", some(EXISTING, ["raw_optax"]))
def test_an_existing_program_is_right(name: str) -> None:
    run_existing(name, None)
