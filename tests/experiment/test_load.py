import pytest

from jdist.errors import ConfigError
from jdist.experiment.load import differences, load
from jdist.support.signature import leaves


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="a.yaml"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write_file


def test_values_come_with_file_and_line(write):
    document = load(write("name: a\ntrain:\n  steps: 3\n  seed: 0\n"))
    assert document.values == {"name": "a", "train": {"steps": 3, "seed": 0}}
    assert document.origins["train", "seed"] == "a.yaml:4"
    assert document.origin(("train", "epochs")) == "a.yaml:2"


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "1.e-3", ".1e-2", "1.0e-3", "0.001"])
def test_numbers_with_exponents_are_numbers_in_file_and_override(write, text):
    document = load(write(f"a: {text}\nb: 0\n"), [f"b={text}"])
    assert document.values == {"a": pytest.approx(1e-3), "b": pytest.approx(1e-3)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("null", None),
        ("true", True),
        ("text", "text"),
        ("'3'", "3"),
        ("2024-01-02", "2024-01-02"),
        ("e3", "e3"),
        ("[1, 2e1]", [1, 20.0]),
        ("{b: {c: 1}}", {"b": {"c": 1}}),
        ("a=b", "a=b"),
        ("x:y", "x:y"),
    ],
)
def test_override_values_are_read_as_yaml(write, text, value):
    assert load(write("a: 0\n"), [f"a={text}"]).values == {"a": value}


def test_an_override_replaces_the_whole_value_and_its_origins(write):
    document = load(write("a: {b: 1, c: 2}\n"), ["a={b: 3}"])
    assert document.values == {"a": {"b": 3}}
    assert document.origins == {("a",): "override a={b: 3}", ("a", "b"): "override a={b: 3}"}


def test_a_later_override_wins_and_levels_that_are_not_there_are_made(write):
    document = load(write("a: null\n"), ["a.b.c=1", "a.b.c=2"])
    assert document.values == {"a": {"b": {"c": 2}}}
    assert document.origin(("a", "b", "c")) == "override a.b.c=2"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "override train.steps: an override is KEY=VALUE"),
        ("=3", "an override is KEY=VALUE"),
        ("a..b=3", "an override is KEY=VALUE"),
        ("a =3", "an override is KEY=VALUE"),
        ("a=", "For no value write a=null"),
        ("a=[1", "override a=[1: not valid YAML"),
        ("a=010", "a: 010 can be read in two ways (override a=010)"),
        ("a={b: 1:30}", "a.b: 1:30 can be read in two ways (override a={b: 1:30})"),
        ("a=!foo 3", "override a=!foo 3: unknown tag !foo"),
        ("a={b: 1, b: 2}", "b: given twice"),
        ("a.b=3", "a.b: a holds the value 1 (a.yaml:1), which has no keys (override a.b=3). Override the whole"),
    ],
)
def test_overrides_that_do_not_fit_are_problems(write, override, message):
    (problem,) = load(write("a: 1\n"), [override]).problems
    assert message in problem


def test_a_key_given_twice_is_named_with_both_lines(write):
    (problem,) = load(write("train:\n  steps: 1\n  seed: 0\n  steps: 2\n")).problems
    assert problem == "train.steps: given twice (a.yaml:2 and a.yaml:4). Keep one."


def test_anchors_and_merge_keys_work_and_own_keys_win(write):
    document = load(write("a: &x {b: 1, c: 2}\nd:\n  <<: *x\n  c: 3\n"))
    assert document.values["d"] == {"b": 1, "c": 3}
    assert document.problems == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- 1\n", "holds list"),
        ("just text\n", "holds str"),
        ("a: b: c\n", "a.yaml:1: not valid YAML"),
        ("a:\n\t- b\n", "a.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: !!python/object:os.system x\n", "a.yaml:1: unknown tag !!python/object:os.system"),
        ("a: *b\n", "a.yaml:1: not valid YAML"),
        ("a: &x [*x]\n", "a.yaml:1: an alias that contains itself"),
        ("? [1, 2]\n: 3\n", "a key must be a name"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
        ("a: \x07\n", "not valid YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_yaml_mapping_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=r"a\.yaml") as caught:
        load(write(text))
    assert message in str(caught.value)


def test_a_missing_file_is_refused_with_the_nearest(write):
    write("a: 1", "digits.yaml")
    with pytest.raises(ConfigError, match=r"digit\.yaml: no such config file\. Did you mean digits\.yaml\?"):
        load("digit.yaml")
    with pytest.raises(ConfigError, match=r"Files there: digits\.yaml"):
        load("z")


def test_a_name_is_not_near_for_the_sake_of_its_folder_and_ending(write, tmp_path):
    (tmp_path / "configs").mkdir()
    write("a: 1", "configs/text.yaml")
    with pytest.raises(ConfigError, match=r"no such config file\. Files there: configs/text\.yaml\.$"):
        load("configs/mnist.yaml")
    with pytest.raises(ConfigError, match=r"Did you mean configs/text\.yaml\?$"):
        load("configs/texts.yml")


def test_a_folder_is_no_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_leaves_are_the_paths_without_further_mappings():
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": [1]})) == {("a", "b"): 1, ("a", "c"): {}, ("d",): [1]}


def test_differences_tell_null_from_missing_only_where_that_is_asked_for():
    there, here = {"a": {"x": None, "y": 1}}, {"a": {"y": 2}, "z": 3}
    changed = {("a", "y"): (1, 2), ("z",): ("not set", 3)}
    assert differences(there, here) == changed
    assert differences(there, here, missing="not set") == changed | {("a", "x"): (None, "not set")}
