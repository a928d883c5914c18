"""One script under the launcher, in Ray's actors, under submitit's local executor and srun: the same losses, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jdist
from jdist import launch
from jdist.errors import LaunchError
from tests.children import without_devices

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("engine_program.py"))
NO_RAY = "pip install 'jdist[ray]'; `make ray` has it"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device for each process, and this jdist."""
    for name, value in (without_devices() | {"PYTHONPATH": str(ROOT)}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The losses under `jdist launch`."""
    folder = tmp_path_factory.mktemp("launch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        end = launch([SCRIPT, str(folder)], processes=2, devices_per_process=1, log_dir=folder / "logs")
    assert end.exit_code == 0, end.failure
    losses = (folder / "losses").read_text()
    assert losses.startswith("2 processes\n1 ")
    assert len(losses.splitlines()) == 11
    return losses


@pytest.mark.full  # by default the resolver's rows in tests/cluster/resolvers/environments.yaml
def test_submitit(expected: str, tmp_path: Path):
    submitit = pytest.importorskip("submitit", reason="pip install submitit")
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=3, tasks_per_node=2)
    job = executor.submit(submitit.helpers.CommandFunction([sys.executable, SCRIPT, str(tmp_path)]))
    job.results()
    assert (tmp_path / "losses").read_text() == expected


@pytest.mark.full  # by default tests/cluster/resolvers/test_files.py, without the training
def test_srun(expected: str, tmp_path: Path):
    """By the batch script of configs/cluster, and a program called srun that starts two tasks with Slurm's variables."""
    (tmp_path / "srun").write_text(
        "#!/bin/bash\n"
        "while [[ $1 == --* ]]; do shift; done\n"
        "export SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2\n"
        'for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & tasks+=($!); done\n'
        'for task in "${tasks[@]}"; do wait "$task" || exit $?; done\n'
    )
    (tmp_path / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for program in ("srun", "python"):
        (tmp_path / program).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "configs" / "cluster" / "slurm.sh"), SCRIPT, str(tmp_path)],
        env={**os.environ, "SLURM_JOB_ID": str(os.getpid()), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "losses").read_text() == expected


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason=NO_RAY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # of the actors
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)  # Ray's own
class TestRay:
    def test_the_losses_are_those_of_the_launcher(self, ray_cluster: Any, expected: str, tmp_path: Path):
        end = jdist.ray_launch([SCRIPT, str(tmp_path)], processes=2, devices_per_process=1, log_dir=tmp_path / "logs")
        assert end.exit_code == 0, end.failure
        assert (tmp_path / "losses").read_text() == expected
        deadline = time.monotonic() + 30
        while ray_cluster.available_resources().get("CPU") != 2:  # Ray says so a moment later
            assert time.monotonic() < deadline, ray_cluster.available_resources()
            time.sleep(0.1)

    @pytest.mark.parametrize("victim", ["process", "actor"])
    def test_what_is_killed_is_named_and_all_start_again(
        self, ray_cluster: Any, expected: str, tmp_path: Path, victim: str, capfd: Any
    ):
        end = jdist.ray_launch(
            [SCRIPT, str(tmp_path), victim],
            processes=2,
            devices_per_process=1,
            max_restarts=1,
            log_dir=tmp_path / "logs",
        )
        assert end.exit_code == 0, end.failure
        assert [attempt.outcome for attempt in end.attempts] == ["failed", "finished"]
        (guilty,) = [attempt.guilty for attempt in end.attempts if attempt.guilty is not None]
        assert (guilty.task.index, guilty.code) == (1, -9)
        said = capfd.readouterr().err
        assert "attempt 0 failed: process 1 was killed by SIGKILL" in said
        assert ("the Ray actor of process 1 is gone" in said) == (victim == "actor")
        assert (tmp_path / "losses").read_text() == expected

    def test_a_cluster_without_room_is_named(self, ray_cluster: Any, tmp_path: Path, capfd: Any):
        end = jdist.ray_launch([SCRIPT], processes=3, start_timeout_s=1.0, log_dir=tmp_path / "logs")
        assert end.exit_code != 0
        said = capfd.readouterr().err
        assert "found no room for 3 processes of 1 CPU each in 1 s; it has 2 CPU" in said

    def test_a_launch_that_waits_for_room_heeds_a_signal(self, ray_cluster: Any, tmp_path: Path, capfd: Any):
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        end = jdist.ray_launch([SCRIPT], processes=3, start_timeout_s=200.0, log_dir=tmp_path / "logs")
        timer.join()
        assert (end.exit_code, end.stop) == (143, signal.SIGTERM)
        assert "asked to stop before all actors were there" in capfd.readouterr().err

    def test_an_error_of_the_script_is_shown(self, ray_cluster: Any, tmp_path: Path, capfd: Any):
        (tmp_path / "bad.py").write_text("raise ValueError('a bad day')\n")
        end = jdist.ray_launch([str(tmp_path / "bad.py")], processes=1, log_dir=tmp_path / "logs")
        assert end.exit_code == 1
        assert "ValueError: a bad day" in capfd.readouterr().err


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"processes": 0}, "processes"),
            ({"start_timeout_s": 0}, "start_timeout_s"),
            ({"max_restarts": -1}, "max_restarts"),
            ({"num_cpus": -1}, "`num_cpus` is -1; it must be a finite number, 0 or more"),
            ({"num_gpus": "a"}, "`num_gpus` is 'a'; it must be a finite number"),
            ({"num_gpus": 1.5}, "`num_gpus` is 1.5; it must be a fraction below 1, or a whole number"),
            ({"resources": [4]}, r"`resources` is \[4\]; it must be a dict"),
            ({"resources": {"TPU": "4"}}, r"`resources\['TPU'\]` is '4'; it must be"),
            ({"resources": {"CPU": 4}}, "`resources` has CPU: give that as num_cpus"),
            ({"num_cpus": 0}, "a process takes nothing of the Ray cluster"),
        ],
    )
    def test_what_is_not_allowed_is_refused(self, options: dict[str, Any], text: str):
        with pytest.raises(LaunchError, match=text):
            jdist.ray_launch([SCRIPT], **options)

    def test_without_ray_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(LaunchError, match=r"pip install 'jdist\[ray\]'"):
            jdist.ray_launch([SCRIPT])
