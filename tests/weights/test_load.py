"""Weights in any strategy's layout: loaded again to the bit, and no host reads or holds more than it has to."""

import importlib
import json
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jdist
from jdist.errors import CheckpointError
from jdist.train import CheckpointWarning
from jdist.weights import files as tensor_files
from jdist.weights.files import Reader
from tests.by_default import some
from tests.children import run_in_two
from tests.toys import LAYOUTS, step_of
from tests.weights import load_in_processes as program


def create():
    rng = np.random.default_rng(0)
    return {
        "dense": {"kernel": jnp.asarray(rng.normal(size=(6, 40)), jnp.float32), "bias": jnp.ones(7, jnp.bfloat16)},
        "stack": jnp.asarray(rng.normal(size=(3, 5, 7)), jnp.float16),
        "nan": jnp.asarray([np.nan, np.inf, -0.0, 1e-45] * 3, jnp.float32),
        "ids": jnp.arange(33, dtype=jnp.int32),
        "flags": jnp.asarray([True, False] * 8),
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(2.5),
    }


RULES = [
    ("w.dense.weight", "dense/kernel", "out in -> in out"),
    ("w.dense.bias", "dense/bias"),
    ("w.{layer}.weight", "stack", "out in -> layer in out"),
    *((f"w.{name}", name) for name in ("nan", "ids", "flags", "empty", "scalar")),
]


def assert_bits(got, want):
    def same(a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())

    jax.tree.map(same, got, want)


@pytest.mark.parametrize("rules", [None, RULES], ids=["no rules", "rules"])
@pytest.mark.parametrize("source", some(LAYOUTS, ["sharded 5", "model axis"]))
def test_what_is_saved_is_loaded_again_to_the_bit(source, rules, tmp_path):
    """By any strategy and into any, and into arrays on the host; in one file or in several."""
    strategy = LAYOUTS[source]()
    state = strategy.init(create)
    for folder, size in (("one", 10**9), ("many", 300)):
        files = jdist.weights.save(state, tmp_path / folder, rules, max_file_bytes=size)
        assert (len(files) > 1) == (folder == "many")
        for name, make in LAYOUTS.items():
            into = make()
            like = into.shapes(jax.eval_shape(create))
            loaded = jdist.weights.load(files[-1] if name == "mirrored" else tmp_path / folder, like, rules)
            assert_bits(into.fetch(loaded), create())
            assert jax.tree.structure(loaded) == jax.tree.structure(like)
            for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(into.init(create)), strict=True):
                assert got.sharding == want.sharding, "as the strategy lays it out"
    assert_bits(jdist.weights.load(tmp_path / "one", jax.tree.map(np.zeros_like, create()), rules), create())


def test_a_large_tensor_is_read_some_rows_at_a_time(tmp_path, monkeypatch):
    """So that the thread that tells other processes of this one has its turn, see `Reader.read`."""
    jdist.weights.save(create(), tmp_path)
    sizes, read = [], Reader._read_block

    def reading(reader, tensor, box):
        values = read(reader, tensor, box)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(tensor_files, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(Reader, "_read_block", reading)
    assert_bits(jdist.weights.load(tmp_path, jax.tree.map(np.zeros_like, create())), create())
    assert max(sizes) == 40 * 4, "a row, where that is more"
    assert len(sizes) > len(jax.tree.leaves(create()))


def test_a_training_goes_on_with_loaded_weights(tmp_path):
    """The parameters are never made at random, and never twice; the step compiles once."""
    strategy = jdist.sharded(jax.devices()[:5], whole_below=8)
    jdist.weights.save({"w": jnp.ones((5, 40))}, tmp_path)

    def create_state(key):
        return jdist.TrainState.create(apply_fn=None, params={"w": jax.random.normal(key, (5, 40))}, tx=optax.adam(0.1))

    @jdist.distribute(strategy)
    @step_of
    def step(params, batch):
        return jdist.mean(batch["x"] @ params["w"], batch["mask"]).mean()

    shapes = jax.eval_shape(create_state, jax.random.key(0))
    state = strategy.init(lambda key: create_state(key).replace(params=None), jax.random.key(0))
    state = state.replace(params=jdist.weights.load(tmp_path, strategy.shapes(shapes.params)))
    batches = strategy.distribute_dataset([{"x": np.ones((10, 5), np.float32)}] * 2)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == 5.0
    assert losses[1] < losses[0]


def test_files_are_those_that_safetensors_reads(tmp_path):
    files = jdist.weights.save(create(), tmp_path, max_file_bytes=300)
    index = json.loads(files[-1].read_text())
    assert files[-1].name == "model.safetensors.index.json"
    tensors = {}
    for i, file in enumerate(files[:-1], start=1):
        assert file.name == f"model-{i:05d}-of-{len(files) - 1:05d}.safetensors"
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            tensors |= {name: file.name for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    assert index["weight_map"] == tensors
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(create()))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_new_head(tmp_path):
    """Leaves that are left keep their values, and what is for them in the file is left out."""
    jdist.weights.save({"body": jnp.ones(4), "head": jnp.ones((4, 10))}, tmp_path)
    like = jdist.mirrored().init(lambda: {"body": jnp.zeros(4), "head": jnp.zeros((4, 3))})
    for options in ({"only": "body"}, {"only": lambda path: "head" not in path}):
        loaded = jdist.weights.load(tmp_path, like, **options)
        assert loaded["head"] is like["head"]
        assert np.asarray(loaded["body"]).tolist() == [1.0] * 4
    with pytest.warns(CheckpointWarning, match=r"1 of 2 leaves keep .*\n.*tensor head: has shape \[4, 10\]"):
        loaded = jdist.weights.load(tmp_path, like, skip_mismatch=True)
    assert loaded["head"] is like["head"]
    with pytest.raises(CheckpointError, match="the weights: leaf head is not restored, and `like` has only its shape"):
        jdist.weights.load(tmp_path, jdist.mirrored().shapes(like), only="body")


def test_a_part_of_a_state_is_saved(tmp_path):
    state = {"params": {"w": jnp.ones(4)}, "key": jax.random.key(0)}
    (file,) = jdist.weights.save(state, tmp_path / "some.safetensors", only="params/.*")
    assert load_file(file).keys() == {"params.w"}
    with pytest.raises(CheckpointError, match="leaf key: is of PRNG keys"):
        jdist.weights.save(state, tmp_path / "all.safetensors")


def test_the_host_holds_one_leaf_at_a_time(tmp_path, monkeypatch):
    count, shape = 12, (600, 513)
    size = 4 * 600 * 513
    strategy = jdist.sharded(whole_below=64)
    tree = {f"w{i}": np.full(shape, i, np.float32) for i in range(count)}
    rules = [("{name}", "{name}", "out in -> in out")]
    state = strategy.init(lambda: tree)
    tracemalloc.start()
    try:
        (file,) = jdist.weights.save(state, tmp_path, rules)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        read = []
        module = importlib.import_module("jdist.weights.load")  # its name is that of the function
        read_leaf = module._read_leaf
        monkeypatch.setattr(
            module, "_read_leaf", lambda reader, *args: (read.append(reader), read_leaf(reader, *args))[1]
        )
        loaded = jdist.weights.load(file, strategy.shapes(tree), rules)
        kept, loading = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert saving < 4 * size, "all leaves would be 12"  # a leaf as it is gathered, and the tensor of it
    assert loading - kept < 4 * size
    assert kept - before <= 1.02 * count * size  # JAX may go on with the arrays that it was given
    assert read[0].bytes_read == count * size
    assert_bits(strategy.fetch(loaded), tree)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    save_file({name: np.asarray(x) for name, x in program.tensors().items()}, folder / "model.safetensors")
    run_in_two(program.__file__, folder)
    return folder


@pytest.fixture(scope="module")
def met(launched):
    return [json.loads((launched / f"{i}.json").read_text()) for i in range(2)]


def test_each_process_reads_its_share(met):
    """Exactly: the parts that its devices hold, without padding, and what each holds whole."""
    for each in met:
        assert each["bytes read"] == each["bytes held"]
    total = sum(x.nbytes for x in program.tensors().values())
    whole = sum(x.nbytes for name, x in program.tensors().items() if name.startswith("few"))
    assert sum(each["bytes read"] for each in met) == total + whole


def test_each_process_holds_its_share_and_a_leaf(met):
    largest = max(4 * np.prod(x.shape) for x in jax.tree.leaves(program.shapes()))
    for each in met:
        assert each["peak"] <= each["bytes read"] + 2.5 * largest + 200_000  # the leaf, and a part of it as it is read


def test_processes_load_and_save_to_the_bit(met, launched):
    assert [each["same"] for each in met] == [True, True]
    again = load_file(launched / "again" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, again, program.tensors())


def test_what_one_process_cannot_read_is_an_error_of_all(met):
    assert re.match("CheckpointError.*tensor rows 1.weight: cannot be read", met[1]["error"])
    assert re.match("PeerFailedError.*process 1: .*tensor rows 1.weight: cannot be read", met[0]["error"])
    assert re.match("CheckpointError.*cannot be written.*No space left", met[0]["full disk"])
    assert re.match("PeerFailedError.*process 0: .*No space left", met[1]["full disk"])


def test_the_reader_counts_bytes(tmp_path):
    save_file({"w": np.arange(12.0).reshape(3, 4)}, tmp_path / "model.safetensors")
    with Reader(tmp_path) as reader:
        values = reader.read(reader.tensors["w"], (slice(1, 3), slice(0, 2)))
        assert values.tolist() == [[4, 5], [8, 9]]
        assert reader.bytes_read == 32
