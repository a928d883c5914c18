import itertools

import pytest
import yaml

from jdist.errors import ConfigError
from jdist.experiment.load import flow, parse


def refused(text, **options):
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.yaml", **options)
    return str(caught.value)


def doubled(first, line, times=30):
    """`times` lines, each of which names the one before it twice: 2 ** times values."""
    names = [f"n{i}" for i in range(times)]
    lines = [line.format(name=now, last=last) for last, now in itertools.pairwise(names)]
    return "\n".join([f"n0: &n0 {first}", *lines])


@pytest.mark.parametrize(
    "text",
    [
        doubled("[x, x]", "{name}: &{name} [*{last}, *{last}]"),
        doubled("{a: x}", "{name}: &{name} {{a: *{last}, b: *{last}}}"),
    ],
    ids=["lists", "mappings"],
)
def test_aliases_that_multiply_are_refused_with_a_line(text):
    message = refused(text)
    assert message.startswith("x.yaml:")
    assert "10,000" in message


def test_merges_that_multiply_do_no_harm():
    text = doubled("{a: x}", "{name}: &{name} {{<<: [*{last}, *{last}]}}")
    if tuple(map(int, yaml.__version__.split(".")[:3])) < (6, 0, 4):
        assert "10,000" in refused(text)
    else:  # takes a key once, however often it is merged in
        assert all(value == {"a": "x"} for value in parse(text, "x.yaml")[0].values())


def test_merges_of_many_keys_are_refused():
    many = ", ".join(f"k{i}: 0" for i in range(6000)), ", ".join(f"j{i}: 0" for i in range(6000))
    message = refused(f"a: &a {{{many[0]}}}\nb: &b {{{many[1]}}}\nc: {{<<: [*a, *b]}}")
    assert "more than 10,000 keys" in message


def test_aliases_in_numbers_that_people_use_are_fine():
    text = "a: &a {b: [1, 2], c: 3}\nd:\n" + "  - *a\n" * 500
    values, _, problems = parse(text, "x.yaml")
    assert values["d"] == [values["a"]] * 500
    assert problems == []
    assert len(parse(f"a: {list(range(20_000))}", "x.yaml")[0]["a"]) == 20_000  # much that is written out is fine too


@pytest.mark.parametrize("text", ["010", "-010", "+07", "00", "089", "0_1", "1:30", "-1:30", "12:00:00", "1:30.5"])
def test_numbers_that_yaml_reads_in_two_ways_are_refused(text):
    assert refused(f"a: 1\nb: {{c: [{text}]}}") == (
        f"b.c.0: {text} can be read in two ways (x.yaml:2): to YAML 1.1 a 0 in front means base 8, a colon base 60. "
        f"Write a number in base 10; for text use quotes: '{text}'."
    )
    assert "can be read in two ways" in refused(f"{text}: 1")
    assert parse(f"a: '{text}'", "x.yaml")[0] == {"a": text}
    assert parse(f"a: {flow(text)}", "x.yaml")[0] == {"a": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("0.5", 0.5), ("10", 10), ("0x10", 16), ("1_000", 1000), ("0:30", "0:30"), ("a:30", "a:30"), ("=", "=")],
)
def test_what_is_read_in_one_way_only_stays_as_it_is(text, value):
    assert parse(f"a: {text}", "x.yaml")[0] == {"a": value}


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        ("!foo x", "!foo"),
        ("!foo [1]", "!foo"),
        ("!foo {a: 1}", "!foo"),
        ("!!set {a}", "!!set"),
        ("!!omap [a: 1]", "!!omap"),
        ("!!binary aGk=", "!!binary"),
        ("!!python/tuple [1]", "!!python/tuple"),
        ("!!python/name:os.system x", "!!python/name:os.system"),
    ],
)
def test_an_unknown_tag_is_refused_with_its_line(value, tag):
    assert refused(f"a: 1\nb: {value}").startswith(f"x.yaml:2: unknown tag {tag}; a config holds plain")
    assert refused(f"a: 1\n{tag} b: 1").startswith(f"x.yaml:2: unknown tag {tag};")
    assert refused(value, line_numbers=False, within=("a",)).startswith(f"x.yaml: unknown tag {tag};")


def test_the_tags_of_plain_values_are_known():
    text = "!!map {a: !!int '7', b: !!float 1, c: !!str 010, d: !!seq [!!bool 'true', !!null ''], e: ! x}"
    assert parse(text, "x.yaml")[0] == {"a": 7, "b": 1.0, "c": "010", "d": [True, None], "e": "x"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("!!int many", "x.yaml:2: 'many' cannot be read as !!int."),
        ("!!bool many", "x.yaml:2: 'many' cannot be read as !!bool."),
        ("9" * 5000, "cannot be read as !!int."),
        ('"\\Uffffffff"', "x.yaml: not valid YAML: "),
    ],
)
def test_what_cannot_be_read_as_its_tag_says_is_refused(value, message):
    assert message in refused(f"a: 1\nb: {value}")


def test_keys_within_another_are_named_in_full():
    values, origins, problems = parse(
        "{a: 1, b: {c: 2}, a: 3}", "override x.y=...", line_numbers=False, within=("x", "y")
    )
    assert values == {"a": 3, "b": {"c": 2}}
    assert origins == dict.fromkeys([("x", "y", "a"), ("x", "y", "b"), ("x", "y", "b", "c")], "override x.y=...")
    assert problems == ["x.y.a: given twice (override x.y=... and override x.y=...). Keep one."]
