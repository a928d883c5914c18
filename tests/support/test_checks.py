"""The law of whole numbers: NumPy's integers are taken wherever Python's are, and mean the same; nothing else is."""

import dataclasses
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import JDistError, StepError
from jdist.strategies.parameter_server import check_parameter_server
from jdist.support import checks
from jdist.support.signature import show
from jdist.support.words import did_you_mean
from jdist.tasks.options import Count, checked


def step(w, batch):
    return w, {}


@checked
def task(*, layers: Count):
    return layers


def parameter_server(**options):
    return check_parameter_server(**({"local_workers": 4, "local_ps": 2} | options))


REFUSALS = [
    (lambda: checks.whole_number("k", 0, StepError), "`k` is 0; it must be a whole number, 1 or more."),
    (lambda: checks.whole_number("k", 1.0, StepError, least=0, unit="bytes"), "a whole number of bytes, 0 or more."),
    (
        lambda: checks.whole_number("k", True, StepError, least=0, most=9, call="f"),
        "f: `k` is True; it must be a whole number from 0 to 9.",
    ),
    (lambda: checks.real_number("x", "1", StepError, fix="Give 1."), "`x` is '1'; it must be a finite number. Give 1."),
    (
        lambda: checks.real_number("x", float("nan"), StepError, above=0),
        "`x` is nan; it must be a finite number above 0.",
    ),
    (lambda: checks.seconds("t", 0, StepError), "`t` is 0; it must be a number of seconds above 0."),
    (lambda: checks.seconds("t", -1, StepError, least=0), "`t` is -1; it must be a number of seconds, 0 or more."),
    (lambda: checks.flag("on", "no", StepError), "`on` is 'no'; it must be True or False."),
    (
        lambda: checks.choice("mode", "synk", ("sync", "async"), StepError),
        "`mode` is 'synk'; it must be 'sync' or 'async'. Did you mean 'sync'?",
    ),
    (
        lambda: checks.choice("op", ["sum"], ("sum", "mean", None), StepError),
        "`op` is ['sum']; it must be one of 'sum', 'mean', None.",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSALS)
def test_each_check_has_one_phrasing(call, words):
    with pytest.raises(StepError) as caught:
        call()
    assert words in str(caught.value)


def test_checks_return_python_values():
    assert checks.whole_number("k", np.int64(3), StepError) == 3
    for half in (np.float32(0.5), np.array(0.5), jnp.float32(0.5)):
        assert checks.real_number("x", half, StepError) == 0.5
    assert checks.flag("on", np.bool_(False), StepError) is False
    assert checks.choice("mode", None, ("sync", None), StepError) is None


SOURCE = jdist.data.from_arrays({"x": np.zeros((8, 2), np.float32)}, global_batch=4)
TAKERS = {  # name: (what takes a whole number, one that it takes)
    **{
        f"distribute({name})": (
            lambda n, name=name: jdist.distribute(step, jdist.one_device(), **{name: n}).options,
            value,
        )
        for name, value in {
            "accumulate": 2,
            "steps_per_call": 2,
            "max_in_flight": 3,
            "check_replicas": 5,
            "batch_axis": 1,
        }.items()
    },
    **{
        f"parameter_server({name})": (lambda n, name=name: parameter_server(**{name: n}), value)
        for name, value in {
            "local_workers": 2,
            "local_ps": 3,
            "devices_per_worker": 2,
            "max_staleness": 2,
            "ps_replicas": 2,
        }.items()
    },
    "parameter_server(backup_workers)": (lambda n: parameter_server(mode="sync", backup_workers=n), 1),
    "fixed_shards": (lambda n: jdist.ps.fixed_shards(n)((8,), np.dtype("float32"), 2), 2),
    "top_k": (lambda n: jdist.metrics.top_k(n).name, 2),
    "confusion_matrix": (lambda n: jdist.metrics.confusion_matrix(n).name, 3),
    "early_stopping": (lambda n: jdist.callbacks.early_stopping("eval/loss", patience=n).name, 3),
    "profiler": (lambda n: jdist.callbacks.profiler("folder", first=n, last=n).name, 3),
    "checkpoint": (lambda n: jdist.callbacks.checkpoint("folder", keep=n).name, 3),
    "InputOptions": (lambda n: jdist.InputOptions(prefetch=n).prefetch, 3),
    "CommunicationOptions": (lambda n: jdist.CommunicationOptions(bytes_per_pack=n).bytes_per_pack, 8),
    "precision": (lambda n: jdist.precision("fp16", growth_interval=n).loss_scaling.growth_interval, 8),
    "hierarchical": (lambda n: jdist.reduction.hierarchical(n, n).name, 2),
    "bucketed": (lambda n: jdist.reduction.bucketed(n).name, 8),
    "linear scaling": (lambda n: jdist.scaling.linear(0.1, base_batch=n, global_batch=8), 4),
    "gradual warm-up": (lambda n: float(jdist.scaling.gradual_warmup(0.1, steps=n, init_value=0.0)(1)), 4),
    "from_arrays": (lambda n: jdist.data.from_arrays({"x": np.zeros(8)}, global_batch=n).num_steps, 4),
    "distribute_dataset": (lambda n: len(list(jdist.one_device().distribute_dataset(SOURCE, steps_per_call=n))), 2),
    "reduce": (
        lambda n: jdist.one_device().reduce("sum", jdist.PerReplica(jnp.ones((1, 2, 2))), axis=n).tolist(),
        1,
    ),
    "gather": (lambda n: jdist.one_device().gather(jdist.PerReplica(jnp.ones((1, 2, 2))), axis=n).tolist(), 1),
    "a task's option": (lambda n: task(layers=n), 2),
}
KINDS = [np.int64, np.int32, np.uint8]


@pytest.mark.parametrize("name", TAKERS)
def test_numpys_mean_the_same(name):
    take, value = TAKERS[name]
    expected = take(value)
    for kind in KINDS:
        found = take(kind(value))
        assert found == expected
        fields = vars(found) if dataclasses.is_dataclass(found) else {"it": found}
        assert not [key for key, x in fields.items() if isinstance(x, np.generic) and key != "batch_axis"]


@pytest.mark.parametrize("wrong", [True, 1.5, "2", np.float64(2), [1]])
@pytest.mark.parametrize("name", TAKERS)
def test_nothing_else_is_taken(name, wrong):
    if name == "distribute(batch_axis)" and wrong == [1]:
        return  # a tree of axes
    with pytest.raises(JDistError) as raised:
        TAKERS[name][0](wrong)
    # An option of a task is named in a config's words.
    assert any(text in str(raised.value) for text in (repr(wrong), show(wrong)))


REALS = {
    "Times": lambda x: jdist.ps.Times(ping_s=x).ping_s,
    "ema": lambda x: jdist.callbacks.ema(x).name,
    "accuracy": lambda x: jdist.metrics.accuracy(threshold=x).name,
    "CommunicationOptions": lambda x: jdist.CommunicationOptions(timeout_s=x + 1).timeout_s,
    "linear scaling": lambda x: jdist.scaling.linear(x, base_batch=4, global_batch=8),
    "parameter_server": lambda x: parameter_server(start_timeout_s=x),
}


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numpys_real_numbers_are_taken_too(name, kind):
    assert REALS[name](kind(0.5)) == REALS[name](0.5)


def test_a_schedule_is_no_number():
    assert callable(jdist.scaling.linear(optax.constant_schedule(0.1), base_batch=4, global_batch=8))


def test_a_config_is_checked_before_jax_is_imported():
    program = (
        "import sys, jdist.cli.configs, jdist.launcher.launch, jdist.experiment.config; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---- the name that was probably meant


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("wroker", " Did you mean 'worker'?"), ("WORKER", " Did you mean 'worker'?"), ("zebra", ""), (None, ""), (3, "")],
)
def test_the_nearest_is_named_and_nothing_where_none_is_near(name, sentence):
    assert did_you_mean(name, ["chief", "worker"]) == sentence
