"""docs/clusters.md and docs/cluster_environments.md are complete, and the script runs."""

import re
from pathlib import Path

import pytest

from jdist import launch
from jdist.cluster import resolve
from jdist.cluster.resolvers.resolve import STARTED
from jdist.errors import ClusterConfigError

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "cluster_environments.md").read_text(encoding="utf-8")
READ = [
    variable
    for path in sorted((ROOT / "jdist" / "cluster" / "resolvers").glob("*.py"))
    for variable in re.findall(
        r'"((?:TF_CONFIG|JAX|KUBERNETES|JOB|SM|TPU|MEGASCALE|OMPI|PMIX?|MPI|CUDA|SLURM|LOCAL|MASTER|TORCH|PET|WORLD_SIZE|RANK'
        r'|LWS|SKYPILOT|SUBMITIT|CLUSTER_SPEC|CLOUD_TPU|MV2|PALS|JSM|LS[BF]|K_MPI|PBS)(?:_[A-Za-z0-9_]*)?)"',
        path.read_text(encoding="utf-8"),
    )
]


def test_it_has_a_row_for_each_file():
    named = set(re.findall(r"^\| .* \| `(configs/cluster/[\w.]+)` \|", GUIDE, re.MULTILINE))
    assert named == {f"configs/cluster/{path.name}" for path in (ROOT / "configs" / "cluster").iterdir()}


def test_it_names_the_resolvers_in_their_order():
    rows = re.findall(r"^\| `(\w+)` \| .*\| .* \|$", REFERENCE, re.MULTILINE)
    assert rows == [resolver.__name__ for resolver in STARTED[:-1]]


def test_it_names_each_variable_that_is_read():
    assert len(set(READ)) > 30
    assert not {variable for variable in READ if not re.search(rf"\b{variable}\b", REFERENCE)}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is not set"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_COORDINATOR_ADDRESS is 'a:1'; it must be set together with "),
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS is '4'; it must be 1 here. srun did not start this"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
            "JOB_COMPLETION_INDEX is '0'; it must be set together with ",
        ),
        ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, "TF_CONFIG: `cluster` is not set"),
    ],
)
def test_an_incomplete_cluster_is_named(environ, message):
    with pytest.raises(ClusterConfigError, match=f"^{re.escape(message)}"):
        resolve(environ)


def test_the_script_goes_on_where_it_was_killed_or_stopped(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = [
        block for block in re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE) if "x =" in block
    ]
    Path("train.py").write_text(script)
    failpoints = ["process=1:step=after:term@30", "process=0:attempt=1:step=after:kill@20"]
    failpoints += ["process=0:attempt=2:step=after:kill@45"]  # which it would come to if it began again
    monkeypatch.setenv("JDIST_FAILPOINTS", ";".join(failpoints))
    end = launch(["train.py"], processes=2, devices_per_process=1, log_dir="logs", max_restarts=2)
    assert [each.guilty and each.guilty.code for each in end.attempts] == [143, -9, None]
    out = [line for line in capfd.readouterr().out.splitlines() if "Gloo" not in line]
    assert out == ["[0] w 3.000, b 1.000 after 80 steps"]
