"""What `import jdist` gives, and what it does not import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jdist

NAMES = [
    "CommunicationOptions",
    "History",
    "InputContext",
    "InputOptions",
    "PerReplica",
    "StepState",
    "Strategy",
    "TrainState",
    "ValueContext",
    "Verification",
    "VerificationWarning",
    "aggregate",
    "all_gather",
    "all_reduce",
    "broadcast",
    "callbacks",
    "central_storage",
    "cluster",
    "compute_average_loss",
    "data",
    "default",
    "distribute",
    "errors",
    "evaluate",
    "explain",
    "export",
    "first_replica_only",
    "fit",
    "get_strategy",
    "global_loss",
    "grad",
    "has_strategy",
    "in_replica_context",
    "launch",
    "make_strategy",
    "mean",
    "metrics",
    "mirrored",
    "multi_worker",
    "nnx",
    "notebook_launch",
    "num_replicas",
    "one_device",
    "optimizer",
    "parameter_server",
    "plan",
    "precision",
    "predict",
    "ps",
    "ray_launch",
    "reduction",
    "replica_axes",
    "replica_id",
    "replica_rng",
    "scale_regularization_loss",
    "scaling",
    "set_strategy",
    "sharded",
    "show",
    "tpu",
    "train",
    "train_and_evaluate",
    "typing",
    "value_and_grad",
    "verify",
    "weights",
]


def test_the_public_names_are_these():
    assert sorted(jdist.__all__) == NAMES
    assert dir(jdist) == NAMES
    for name in NAMES:
        assert getattr(jdist, name) is not None
    assert jdist.__version__


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'jdist' has no attribute 'miror'"):
        _ = jdist.miror


def test_importing_it_imports_no_jax_until_something_is_used():
    program = """
import sys
from pathlib import Path
import jdist, jdist.errors
heavy = ["jax", "flax", "optax", "chex", "numpy", "pydantic", "yaml", "tyro", "rich", "orbax", "sklearn", "matplotlib"]
assert not [name for name in heavy if name in sys.modules], [name for name in heavy if name in sys.modules]
jdist.mirrored
assert "jax" in sys.modules
jdist.distribute, jdist.TrainState, jdist.data, jdist.mean, jdist.make_strategy
absent = [name for name in heavy[5:] if name in sys.modules]
assert not absent, absent
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_it_is_imported_from_a_zip_file_too(tmp_path):
    archive = shutil.make_archive(str(tmp_path / "jdist"), "zip", Path(jdist.__file__).parents[1], "jdist")
    code = "import jdist; assert '.zip' in jdist.__file__, jdist.__file__; print(jdist.errors.StepError.__name__)"
    environ = {**os.environ, "PYTHONPATH": archive}
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "StepError\n", done.stderr
