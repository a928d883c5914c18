"""The options of `jdist.distribute`."""

import dataclasses
import inspect

import pytest

import jdist
from jdist.errors import StepError
from jdist.step.options import RunKeywords, StepKeywords, StepOptions, make_options


def test_defaults():
    options = make_options()
    assert options == StepOptions()
    assert (options.args, options.returns, options.static_argnames) == (("state", "batch"), None, ())
    assert (options.donate, options.accumulate, options.steps_per_call, options.max_in_flight) == (True, 1, 1, 8)
    assert (options.check_replicas, options.non_finite) == (1000, "raise")


def test_lists_become_tuples_and_a_string_a_tuple_of_one():
    options = make_options(args=["state", "batch"], returns="metrics", static_argnames="train")
    assert (options.args, options.returns, options.static_argnames) == (("state", "batch"), ("metrics",), ("train",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"acumulate": 2},
            r"no option `acumulate`\. Did you mean 'accumulate'\? It has: args, returns, static_argnames",
        ),
        ({"zzz": 2}, r"no option `zzz`\. It has: args,"),
        (
            {"args": ("state", "bach")},
            r"`args\[1\]` is 'bach'; it must be one of 'state', 'batch', .*Did you mean 'batch'\?",
        ),
        ({"args": ("metrics",)}, r"`args\[0\]` is 'metrics'; it must be one of"),
        (
            {"args": ("state", "batch", "state"), "returns": ("state",)},
            r"a step returns as many states as it takes, in their order",
        ),
        ({"args": None}, r"`args` is None; it must be a tuple of roles"),
        ({"args": {"state": 0}}, r"`args` is \{'state': 0\}; it must be a tuple"),
        ({"returns": ("state", "metric")}, r"`returns\[1\]` is 'metric'.*Did you mean 'metrics'\?"),
        (
            {"returns": ("batch",)},
            r"`returns\[0\]` is 'batch'; it must be one of 'state', 'metrics', 'examples'",
        ),
        ({"returns": ()}, r"`returns` is \(\); it needs one role or more"),
        ({"returns": ("state", "state")}, r"`args` is \('state', 'batch'\): a step returns as many states as it takes"),
        ({"args": ("batch",), "returns": ("state",)}, r"but `args` is \('batch',\) without a \"state\" to update"),
        (
            {"non_finite": "rise"},
            r"`non_finite` is 'rise'; it must be one of 'raise', 'skip', 'apply'\. Did you mean 'raise'",
        ),
        ({"accumulate": 0}, r"`accumulate` is 0; it must be a whole number, 1 or more"),
        ({"accumulate": 2.0}, r"`accumulate` is 2\.0; it must be a whole number"),
        ({"donate": "no"}, r"`donate` is 'no'; it must be True or False"),
        ({"accumulate": True}, r"`accumulate` is True"),
        ({"steps_per_call": 10**30}, r"it must be at most 2,147,483,647"),
        ({"batch_axis": []}, r"`batch_axis` is \[\], which names no axis"),
        ({"batch_axis": {}}, r"`batch_axis` is \{\}, which names no axis"),
        ({"steps_per_call": -1}, r"`steps_per_call` is -1; it must be a whole number, 1 or more"),
        ({"max_in_flight": 0}, r"`max_in_flight` is 0; it must be a whole number, 1 or more"),
        ({"check_replicas": -1}, r"`check_replicas` is -1; it must be a whole number, 0 or more"),
        ({"check_replicas": None}, r"`check_replicas` is None"),
        ({"steps_per_call": 2, "args": ("batch",)}, r"`steps_per_call` needs a \"state\""),
        ({"steps_per_call": 2, "args": ("state",)}, r"`steps_per_call` needs a .* and a \"batch\" each"),
        ({"steps_per_call": 2, "returns": ("state", "examples")}, r"\"examples\" needs `steps_per_call=1`"),
    ],
)
def test_what_is_not_allowed_is_refused_before_any_step(options, message):
    with pytest.raises(StepError, match=message):
        jdist.distribute(jdist.default(), **options)
    with pytest.raises(StepError, match=message):
        jdist.distribute(lambda state, batch: state, jdist.default(), **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"returns": ("state",)}, True),
        ({"returns": ("metrics",)}, False),
        ({"args": ("batch",)}, False),
    ],
)
def test_may_update_state(options, expected):
    assert make_options(**options).may_update_state is expected


@pytest.mark.parametrize("function", [jdist.distribute, jdist.nnx.distribute])
def test_editors_and_help_see_every_option(function):
    names = {field.name for field in dataclasses.fields(StepOptions)}
    assert names == set(StepKeywords.__annotations__) == set(RunKeywords.__annotations__) | {"args", "returns"}
    shown = inspect.signature(function).parameters
    assert names <= set(shown)
    assert all(p.kind is not p.VAR_KEYWORD for p in shown.values())
    assert shown["accumulate"].default == 1
