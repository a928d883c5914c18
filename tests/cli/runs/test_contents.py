"""`jdist checkpoint`: what a checkpoint holds, without its arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.cli.main import main
from jdist.cli.runs import contents
from jdist.train import Checkpointer

STATE = {"params": {"kernel": jnp.ones((40, 3), jnp.bfloat16)}, "rng": jax.random.key(0), "count": 3}


@pytest.fixture
def listed(capsys):
    """`jdist checkpoint PATH`: the exit code, standard output, and standard error."""

    def run(path):
        return main(["checkpoint", str(path)]), *capsys.readouterr()

    return run


def test_the_newest_checkpoint_of_a_run(tmp_path, listed):
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(3, STATE)
        averages = {"ema": {"params": {"kernel": jnp.ones((40, 3))}}}
        checkpoints.save(1_004, jdist.StepState(STATE, kept=averages), data={"position": 7}, metrics={"eval/loss": 0.5})
    saved = tmp_path / "run" / "checkpoints" / "step_00001004_save_00002"
    (saved / "pieces_0.bin").write_bytes(bytes((saved / "pieces_0.bin").stat().st_size))  # its arrays are not read
    want = f"""\
{saved}: step 1,004; there are steps 3, 1,004
data: {{"position": 7}}
metrics: {{"eval/loss": 0.5}}
metadata: {{}}

leaf                    dtype       shape    bytes
count                   python int  []           8
params/kernel           bfloat16    [40, 3]    240
rng                     key<fry>    []           8
kept ema/params/kernel  float32     [40, 3]    480

4 leaves, 736 B
"""
    for path in (tmp_path / "run", saved.parent, saved):
        code, out, err = listed(path)
        assert (code, err) == (0, "")
        assert out == (want if path != saved else want.replace("; there are steps 3, 1,004", ""))


def test_what_is_not_jdists(tmp_path, listed):
    jdist.weights.save({"dense": {"kernel": jnp.ones((2, 3))}}, tmp_path / "w" / "model.safetensors")
    code, out, _ = listed(tmp_path / "w")
    assert code == 0
    assert out.endswith("leaf          dtype    shape   bytes\ndense.kernel  float32  [2, 3]     24\n\n1 leaf, 24 B\n")
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"w": np.arange(4.0), "n": 3})
    code, out, _ = listed(tmp_path / "orbax")
    assert code == 0
    assert out.startswith(f"{tmp_path}/orbax: an Orbax checkpoint\n")
    assert "\nw     float64     [4]       32\n" in out


def test_a_bucket(listed):
    with Checkpointer("memory://bucket/run") as checkpoints:
        checkpoints.save(1, STATE)
    assert listed("memory://bucket/run")[1].endswith("\n\n3 leaves, 256 B\n")
    code, _, err = listed("memory://bucket/none")
    assert (code, err) == (1, "jdist: memory:///bucket/none: found no jdist checkpoint\n")


def test_a_damaged_one_is_passed_over_and_named(tmp_path, listed):
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.save(2, STATE)
    manifest = tmp_path / "run" / "step_00000002_save_00002" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    code, out, _ = listed(tmp_path / "run")
    assert code == 0
    assert out.startswith(f"passed over: {manifest}: cannot be read: ")
    assert f"{tmp_path}/run/step_00000001_save_00001: step 1; there are steps 1, 2\n" in out


@pytest.mark.parametrize("name", ["x" * 300, "link"])
def test_what_the_system_refuses_is_one_line(tmp_path, listed, name):
    (tmp_path / "link").symlink_to("link")
    code, out, err = listed(tmp_path / name)
    assert (code, out) == (1, "")
    assert err.startswith(f"jdist: {tmp_path}/{name}: ")
    assert err.count("\n") == 1


def test_there_is_none(tmp_path, listed):
    code, out, err = listed(tmp_path / "none")
    assert (code, out) == (1, "")
    assert f"no safetensors, and no Orbax tree: {tmp_path}/none: the folder does not exist." in err


def test_a_reader_that_goes_away_is_no_error(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, STATE)

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(BrokenPipeError):
        contents.show(str(tmp_path / "run"))
