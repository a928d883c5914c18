"""Files that do not fit or are damaged: each named with file and tensor before anything is read, and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jdist
from jdist.errors import CheckpointError
from jdist.train import CheckpointWarning
from tests.children import without_devices
from tests.weights import save_killed

LIKE = {"body": {"kernel": jnp.zeros((4, 6)), "bias": jnp.zeros(6)}, "head": jnp.zeros(3)}
RULES = [("l.{name}.weight", "{name}/kernel", "out in -> in out"), ("l.{name}.bias", "{name}/bias"), ("head", "head")]


def tensors(**changes):
    whole = {"l.body.weight": np.ones((6, 4)), "l.body.bias": np.ones(6), "head": np.ones(3)} | changes
    return {
        name: np.asarray(x, x.dtype if x.dtype != np.float64 else np.float32) for name, x in whole.items() if x.size
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    return path


def refusal(files, rules=RULES, like=LIKE, **options):
    with pytest.raises(CheckpointError) as raised:
        jdist.weights.load(files, like, rules, **options)
    assert not any(np.any(x) for x in jax.tree.leaves(like))
    return str(raised.value)


NONE = np.zeros(0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"l.body.bias": NONE}, "leaf body/bias: tensor l.body.bias is not in the files"),
        ({"more": np.ones(3)}, "{file}: tensor more: no rule is for it. Add one, or (name, None) to leave it out"),
        ({"l.neck.bias": np.ones(3)}, "{file}: tensor l.neck.bias: is for neck/bias, which the state does not have"),
        (
            {"l.body.weight": np.ones((4, 6))},
            "{file}: tensor l.body.weight: has shape [4, 6], which does not fit leaf body/kernel of shape [4, 6] "
            "(axes: out in -> in out)",
        ),
        ({"head": np.ones((3, 1))}, "{file}: tensor head: has shape [3, 1], which does not fit leaf head of shape [3]"),
        ({"head": np.ones(3, np.int32)}, "{file}: tensor head: has dtype int32, and leaf head float32: only floating"),
        ({"head": np.ones(3, bool)}, "{file}: tensor head: has dtype bool, and leaf head float32: only floating"),
        (
            {"head": np.ones(3, ml_dtypes.float8_e4m3fn)},
            "{file}: tensor head: has dtype F8_E4M3; jdist reads F64, F32,",
        ),
    ],
)
def test_a_tensor_that_does_not_fit(file, changes, says):
    save_file(tensors(**changes), file)
    assert says.format(file=file) in refusal(file)


def test_all_that_is_wrong_is_named_at_once(file):
    save_file({"head": np.ones(4, np.float32), "a": np.ones(1), "b": np.ones(1)}, file)
    text = refusal(file)
    assert text.count("\n") == 5
    for name in ("l.body.weight", "l.body.bias", "tensor head", "tensor a:", "tensor b:"):
        assert name in text


def test_float64_is_rounded_only_when_asked(file):
    save_file(tensors() | {"head": np.full(3, 0.1)}, file)
    assert "float32 cannot hold each value of it; `jdist.weights.load(..., cast=True)` rounds" in refusal(file)
    assert np.asarray(jdist.weights.load(file, LIKE, RULES, cast=True)["head"]).tolist() == [np.float32(0.1)] * 3


@pytest.mark.parametrize("cut", [1, 13, 110])
def test_a_truncated_file_names_its_tensor(file, cut):
    """The one that it ends in: the last of them, unless more than that is gone."""
    file.write_bytes(file.read_bytes()[:-cut])
    text = refusal(file)
    assert text.startswith(f"{file}: cannot be read as safetensors")
    last = {1: "l.body.weight", 13: "l.body.weight", 110: "l.body.bias"}[cut]
    assert f"It ends within tensor {last};" in text


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"", b"12345", b"<html>not found</html>", b"\x08" + b"\0" * 7 + b"{nojson}"])
def test_what_is_no_safetensors(tmp_path, content):
    path = write(tmp_path / "model.safetensors", content)
    assert f"{path}: cannot be read as safetensors" in refusal(path)


def test_files_that_are_not_there(tmp_path):
    assert f"{tmp_path}/no.safetensors: the file does not exist" in refusal(tmp_path / "no.safetensors")
    assert f"{tmp_path}: has no *.safetensors" in refusal(tmp_path)
    assert f"{tmp_path}/no: the file does not exist" in refusal(tmp_path / "no")
    assert "`files` is empty" in refusal([])
    for name in ("a", "b"):
        save_file(tensors(), tmp_path / f"{name}.safetensors")
    assert "has 2 of *.safetensors: a.safetensors, b.safetensors. Say which" in refusal(tmp_path)
    both = refusal([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert f"{tmp_path}/b.safetensors: tensor head is in {tmp_path}/a.safetensors as well" in both


@pytest.fixture
def index(tmp_path):
    state = {"body": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}, "head": jnp.ones(3)}
    *_, path = jdist.weights.save(state, tmp_path, RULES, max_file_bytes=60)
    assert path.name == "model.safetensors.index.json"
    return path


def test_a_file_of_an_index_that_is_missing(index):
    (gone, *_) = index.parent.glob("model-00002*")
    (name,) = [name for name, file in json.loads(index.read_text())["weight_map"].items() if file == gone.name]
    gone.unlink()
    text = refusal(index.parent)
    assert f"{gone}: is not there, and model.safetensors.index.json lists 1 tensors in it, {name}" in text


def test_files_of_another_index(index):
    (other, *_) = index.parent.glob("model-00002*")
    held = load_file(other)
    save_file(held | {"more": np.ones(1)}, other)
    assert f"{other}: tensor more, which the index does not list" in refusal(index)
    name = next(iter(held))
    save_file({"more": np.ones(1)}, other)
    assert f"{other}: tensor " in refusal(index)
    save_file({}, other)
    assert f"{other}: tensor {name}, which the index lists, is not there" in refusal(index)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", *(f'{{"weight_map": {each}}}' for each in ("3", '{"a": ["b"]}', '{"a": 3}', '{"a": null}'))],
)
def test_what_is_no_index(index, content):
    index.write_text(content)
    assert f"{index}: is not an index" in refusal(index)


def test_an_index_names_files_beside_it_alone(index):
    index.write_text('{"weight_map": {"head": "../model.safetensors"}}')
    assert "the file '../model.safetensors' is not in the folder of the index" in refusal(index)


def test_a_mismatch_is_passed_over_when_asked_for(file):
    save_file(tensors(head=np.ones(9), more=np.ones(1)), file)
    with pytest.warns(CheckpointWarning, match=r"1 of 3 leaves keep their values.*\n.*\n.*more") as warned:
        loaded = jdist.weights.load(file, LIKE, RULES, skip_mismatch=True)
    assert loaded["head"] is LIKE["head"]
    assert np.asarray(loaded["body"]["bias"]).all()
    assert len(warned) == 1
    save_file({"more": np.ones(1)}, file)
    assert "no tensor fits a leaf" in refusal(file, skip_mismatch=True)


def test_leaves_without_a_rule(file):
    like = LIKE | {"neck": jnp.zeros(2)}
    assert "leaf neck: no rule is for it" in refusal(file, like=like)
    twice = [*RULES, ("b.{i}", "body/bias", "(i a) -> i a")]
    assert "its shape [6] does not fit the axes of the rule ('b.{i}', 'body/bias', '(i a) -> i a')" in refusal(
        file, rules=twice
    )
    half = [("l.body.bias", "body/bias", "a -> (half a)", {"half": 0}), *RULES]
    assert "leaf body/bias: the rules for it give 12 of its 6 elements" in refusal(file, rules=half)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([("w", "body/kernel")], "leaf body/bias: no rule is for it"),
        ([("w", "body/kernel"), ("b", "body/bias"), ("w", "head")], "do not agree on its shape or dtype"),
        (
            [("w", "body/kernel"), ("b", "body/bias"), ("h", "head", "(three a) -> a", {"three": 1})],
            "tensor h: its leaves head fill 3 of its 6 elements",
        ),
        (
            [("w", "body/kernel"), ("h", "body/bias", "a -> a"), ("h", "head", "a -> a")],
            "tensor h: its leaves body/bias, head do not agree",
        ),
    ],
)
def test_rules_by_which_nothing_can_be_saved(tmp_path, rules, says):
    with pytest.raises(CheckpointError, match="these weights cannot be saved") as raised:
        jdist.weights.save(LIKE, tmp_path, rules)
    assert says in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_leaf_that_is_called_as_the_header_of_the_file(tmp_path):
    tree = {"__metadata__": jnp.ones(3), "w": jnp.ones(2)}
    with pytest.raises(
        CheckpointError, match="leaf __metadata__: the file format reserves the tensor name __metadata__"
    ):
        jdist.weights.save(tree, tmp_path / "a")
    rules = [("about", "__metadata__"), ("w", "w")]
    jdist.weights.save(tree, tmp_path / "b", rules)
    assert jdist.weights.load(tmp_path / "b", tree, rules)["__metadata__"].tolist() == [1, 1, 1]


def test_two_leaves_of_one_part_of_a_tensor(tmp_path):
    """Their sizes make up the whole tensor, of which one part would be what the memory held."""
    rules = [("qkv", name, "(qkv a) -> a", {"qkv": i}) for name, i in [("query", 0), ("key", 0), ("value", 2)]]
    with pytest.raises(CheckpointError, match=r"tensor qkv: leaf key and leaf query are both part \{'qkv': 0\} of it"):
        jdist.weights.save({name: jnp.ones(2) for name in ("query", "key", "value")}, tmp_path, rules)
    with pytest.raises(CheckpointError, match="tensor w: leaf a and leaf b are both all of it"):
        jdist.weights.save({"a": jnp.ones(2), "b": jnp.ones(2)}, tmp_path, [("w", "a"), ("w", "b")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first", [10**9, 60])
def test_one_file_and_several_do_not_stand_beside_each_other(tmp_path, first):
    """A reader would take the older of the two."""
    jdist.weights.save(LIKE, tmp_path, RULES, max_file_bytes=first)
    with pytest.raises(CheckpointError, match=r"/model\.safetensors(\.index\.json)?: is there already"):
        jdist.weights.save(LIKE, tmp_path, RULES, max_file_bytes=60 + 10**9 - first)


@pytest.mark.parametrize(
    ("path", "says"), [("s3://bucket/model.safetensors", "is a URL, and safetensors files"), (5, "5 is not a path")]
)
def test_what_is_no_path_on_a_disk(tmp_path, monkeypatch, path, says):
    monkeypatch.chdir(tmp_path)
    assert says in refusal(path)
    with pytest.raises(CheckpointError, match=says):
        jdist.weights.save(LIKE, path, RULES)
    assert not list(tmp_path.iterdir())


def test_any_path_of_the_standard_library_is_taken(file):
    class Other(os.PathLike):
        def __fspath__(self):
            return str(file)

    assert np.asarray(jdist.weights.load(Other(), LIKE, RULES)["head"]).tolist() == [1.0] * 3


def test_one_of_several_files_is_taken_where_it_is_named(tmp_path):
    first, *others = jdist.weights.save(LIKE, tmp_path, RULES, max_file_bytes=60)
    for file in others:
        file.unlink()
    with pytest.warns(CheckpointWarning):
        jdist.weights.load(first, LIKE, RULES, skip_mismatch=True)


def test_two_saves_at_once_into_one_place(tmp_path, monkeypatch):
    """As by processes that do not save together: the second writes nothing, and the first is whole."""
    module = sys.modules["jdist.weights.save"]
    gather, refused = module._gather, []

    def with_another(leaf):
        monkeypatch.setattr(module, "_gather", gather)
        with pytest.raises(CheckpointError, match=r"is being saved already.*`cluster=strategy\.cluster`") as raised:
            jdist.weights.save(LIKE, tmp_path, RULES)
        refused.append(raised)
        return gather(leaf)

    monkeypatch.setattr(module, "_gather", with_another)
    tree = jax.tree.map(jnp.ones_like, LIKE)
    (file,) = jdist.weights.save(tree, tmp_path, RULES)
    assert len(refused) == 1
    assert list(tmp_path.iterdir()) == [file]
    jax.tree.map(np.testing.assert_array_equal, jdist.weights.load(file, LIKE, RULES), tree)


def test_a_save_replaces_nothing(file):
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"is there already\. Save elsewhere, or remove it first"):
        jdist.weights.save(LIKE, file, RULES)
    assert file.read_bytes() == before


@pytest.mark.parametrize("fails_at", ["begin", "add", "commit"])
def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch, fails_at):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["jdist.weights.save"]._Writer, fails_at, fails)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device\. Free or mend the disk"):
        jdist.weights.save(LIKE, tmp_path, RULES, max_file_bytes=60)
    assert not list(tmp_path.iterdir())


# The size of a file, where the save is killed, the how many-th time, and whether all of it is there then.
KILLS = [
    (10**9, "before add", 2, False),
    (10**9, "before rename", 1, False),
    (10**9, "after rename", 1, True),
    (40_000, "before add", 2, False),
    (40_000, "after rename", 1, False),
    (40_000, "after rename", 3, False),  # all but the index
    (40_000, "after rename", 4, True),
]


@pytest.mark.parametrize(("size", "stage", "call", "is_whole"), KILLS)
def test_a_save_that_is_killed_leaves_all_weights_or_none_that_load(tmp_path, size, stage, call, is_whole):
    line = [sys.executable, save_killed.__file__, tmp_path, str(size), stage, str(call)]
    killed = subprocess.run(
        line, env={**without_devices(), "PYTHONPATH": str(Path(__file__).parents[2])}, timeout=120, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    like = save_killed.weights(100)
    if not is_whole:
        with pytest.raises(CheckpointError, match=r"has no \*\.safetensors|is one of several files, and their index"):
            jdist.weights.load(tmp_path, like, skip_mismatch=True)
        for part in tmp_path.glob("model-*"):  # a save replaces nothing
            part.unlink()
        jdist.weights.save(save_killed.weights(7), tmp_path)  # what else is left is in nobody's way
    loaded = jdist.weights.load(tmp_path, like)
    jax.tree.map(np.testing.assert_array_equal, loaded, save_killed.weights(7))


def test_a_file_of_several_is_not_taken_for_the_whole(index):
    index.unlink()
    (first, *others) = sorted(index.parent.glob("model-*"))
    says = (
        f"{index.parent}: {first.name} is one of several files, and their index, *.safetensors.index.json, is missing"
    )
    assert says in refusal(index.parent)
    for other in others:
        other.unlink()
    assert says in refusal(index.parent, skip_mismatch=True)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "5GB", True])
def test_bytes_of_a_file(tmp_path, bad):
    with pytest.raises(CheckpointError, match="`max_file_bytes` is"):
        jdist.weights.save(LIKE, tmp_path, RULES, max_file_bytes=bad)


def test_without_safetensors_the_extra_is_named(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "Install it: pip install 'jdist[weights]'" in refusal(file)
