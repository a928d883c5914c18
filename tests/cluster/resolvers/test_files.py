"""configs/cluster/: each file is what its platform takes, and gives each process its place in one cluster."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from jdist.cluster import resolve
from jdist.ps.coordinator.servers import check_place
from jdist.ps.transport.security import AUTHORITY, CERTIFICATE, KEY, NAME
from tests.cluster.resolvers.manifest_environments import jobset_of_trainjob, pods_of_jobset, pods_of_tfjob
from tests.cluster.resolvers.manifest_schemas import SCHEMAS, check

FOLDER = Path(__file__).parents[3] / "configs" / "cluster"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh"))
TLS = (CERTIFICATE, KEY, AUTHORITY)
COMMAND = ["jdist", "run", "configs/digits.yaml", "strategy.name=multi_worker"]


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def specs(environments):
    """What each process finds, after the check that all find the same cluster and each another place."""
    found = [resolve(environ) for environ in environments]
    assert [spec.process_index for spec in found] == list(range(len(found)))
    assert {spec.num_processes for spec in found} == {len(found)}
    assert len({spec.coordinator_address for spec in found}) == 1
    return found


def test_the_files():
    assert MANIFESTS == [
        "gke_tpu.yaml",
        "jobset.yaml",
        "kubeflow_tfjob.yaml",
        "kubeflow_trainjob.yaml",
        "parameter_server.yaml",
    ]
    assert SCRIPTS == ["cloud_tpu.sh", "slurm.sh"]


@pytest.mark.parametrize("name", MANIFESTS + SCRIPTS)
def test_a_file_opens_with_what_it_is_the_command_and_what_to_change(name):
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    header = [line for line in lines[:16] if line.startswith("# ")]
    assert [
        entry for entry in ("What", "Command", "Change") if any(line.startswith(f"# {entry}:") for line in header)
    ] == [
        "What",
        "Command",
        "Change",
    ]
    assert any(f"configs/cluster/{name}" in line for line in header)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_what_the_platform_takes(name):
    for document in documents(name):
        check(document, SCHEMAS[document["kind"]], document["kind"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_runs_jdist_and_keeps_its_runs_on_a_volume(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    command = ["python", "-u", "train.py"] if name == "parameter_server.yaml" else COMMAND
    assert text.count(f"command: [{', '.join(command)}]") == 1
    for document in documents(name):
        if document["kind"] in ("JobSet", "TrainingRuntime", "TFJob"):
            assert re.search(r"'mountPath': '/work/runs'.*'claimName': 'runs'", str(document))


@pytest.mark.parametrize("name", ["jobset.yaml", "kubeflow_tfjob.yaml", "kubeflow_trainjob.yaml"])
def test_pods_with_gpus_share_memory_as_nccl_needs_it(name):
    text = str(documents(name))
    assert "nvidia.com/gpu" in text
    assert "{'name': 'shm', 'mountPath': '/dev/shm'}" in text
    assert "{'name': 'shm', 'emptyDir': {'medium': 'Memory'}}" in text


@pytest.mark.parametrize("name", ["jobset.yaml", "gke_tpu.yaml", "kubeflow_trainjob.yaml"])
def test_exit_codes_1_and_2_end_the_job_and_others_start_it_again(name):
    spec = documents(name)[0]["spec"]
    spec = spec["template"]["spec"] if "template" in spec else spec
    assert spec["failurePolicy"]["maxRestarts"] > 0
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [1, 2, 74])
    (container,) = job["template"]["spec"]["containers"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "Kubernetes demands it with a podFailurePolicy"


def test_jobset():
    (jobset,) = documents("jobset.yaml")
    pods = pods_of_jobset(jobset)
    found = specs(pods)
    assert len(found) == 4
    assert {(spec.resolver, spec.coordinator_address) for spec in found} == {
        ("kubernetes", "jdist-workers-0-0.jdist:8476")
    }
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [8476, 8477]


def test_kubeflow_trainjob():
    runtime, trainjob = documents("kubeflow_trainjob.yaml")
    found = specs(pods_of_jobset(jobset_of_trainjob(runtime, trainjob)))
    assert len(found) == 4
    assert {(spec.resolver, spec.coordinator_address) for spec in found} == {
        ("kubernetes", "jdist-node-0-0.jdist:29500")
    }


def test_kubeflow_tfjob():
    (tfjob,) = documents("kubeflow_tfjob.yaml")
    found = specs(pods_of_tfjob(tfjob))
    assert len(found) == 4
    assert found[0].resolver == "tf_config"
    assert found[3].processes[3] == found[3].address == "jdist-worker-3.default.svc:2222"


def test_parameter_server():
    (jobset,) = documents("parameter_server.yaml")
    pods = pods_of_jobset(jobset)
    found = [resolve(environ) for environ in pods]
    places = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
    assert [(spec.task_type, spec.task_index) for spec in found] == places
    assert {spec.resolver for spec in found} == {"tf_config"}
    for spec in found:
        assert spec.address == f"jdist-{spec.task_type}-0-{spec.task_index}.jdist:2222"
        assert spec.jobs == found[0].jobs
    check_place(found[0])
    assert all(environ["JDIST_TOKEN"] == "the secret's token" for environ in pods)
    assert all({*TLS, NAME} <= environ.keys() for environ in pods)
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief"]
    for replicated in jobset["spec"]["replicatedJobs"][1:]:
        pod = replicated["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == ["jdist", "serve", "--health-address", "0.0.0.0:2223"]
        assert container["readinessProbe"] == {"grpc": {"port": 2223}}
        assert pod["restartPolicy"] == "OnFailure"


@pytest.mark.parametrize("slices", [1, 2])
def test_gke_tpu(slices):
    (jobset,) = documents("gke_tpu.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 2
    replicated["replicas"] = slices
    found = specs(pods_of_jobset(jobset, gke=True))
    assert len(found) == 4 * slices
    assert {(spec.resolver, spec.coordinator_address) for spec in found} == {("tpu", "jdist-slice-0-0.jdist:8482")}
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [8482, 8483]


def test_the_chips_of_a_tpu_slice_are_those_of_its_hosts():
    (jobset,) = documents("gke_tpu.yaml")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert int(rows) * int(columns) == chips * job["parallelism"]


@pytest.fixture
def programs(tmp_path):
    """A folder for programs that stand in for a platform's; `run` runs bash with these found first."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def program(name, body):
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)

    def run(*command, **environ):
        path = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        return subprocess.run(
            ["bash", *command],
            env=path | environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return program, run


def directives():
    lines = (FOLDER / "slurm.sh").read_text(encoding="utf-8").splitlines()
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.+))?$", "\n".join(lines), re.MULTILINE))


def test_slurm_directives_stand_before_the_first_command():
    lines = (FOLDER / "slurm.sh").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert len(directives()) == sum(line.startswith("#SBATCH") for line in lines[:first])
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]


def test_slurm(programs, tmp_path):
    """srun sets these variables in each task (Slurm's manual, srun, "Output environment variables")."""
    program, run = programs
    program("srun", 'printf "%s\\n" "$@" > arguments; env > environment')
    done = run(
        str(FOLDER / "slurm.sh"), "configs/digits.yaml", "train.steps=20", SLURM_JOB_ID="4711", SLURM_CPUS_PER_TASK="32"
    )
    assert (done.returncode, done.stderr) == (0, "")
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[arguments.index("jdist") :] == [*COMMAND, "train.steps=20"]
    exported = dict(line.partition("=")[::2] for line in (tmp_path / "environment").read_text().splitlines())
    asked = directives()
    assert exported["SRUN_CPUS_PER_TASK"] == asked["cpus-per-task"]
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    environments = [
        exported
        | {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": f"node[001-{nodes:03d}]",
            "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % tasks),
            "SLURM_GPUS_ON_NODE": asked["gpus-per-node"],
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(asked["gpus-per-node"])))),
        }
        for rank in range(nodes * tasks)
    ]
    found = specs(environments)
    assert len(found) == 4
    assert found[0].resolver == "slurm"
    assert found[0].coordinator_address.startswith("node001:")
    assert {spec.local_device_ids for spec in found} == {None}


def test_slurm_runs_a_script_of_ones_own(programs, tmp_path):
    program, run = programs
    program("srun", 'printf "%s\\n" "$@" > arguments')
    done = run(str(FOLDER / "slurm.sh"), "my train.py", "--rate", "1e-3", SLURM_JOB_ID="4711")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "arguments").read_text().splitlines()[-5:] == ["python", "-u", "my train.py", "--rate", "1e-3"]


@pytest.mark.parametrize(
    ("codes", "runs", "code"),
    [
        ([0], 1, 0),
        ([1], 1, 1),
        ([2], 1, 2),
        ([130], 1, 130),
        ([75, 0], 2, 0),
        ([137, 75, 0], 3, 0),
        ([75] * 9, 4, 75),
    ],
    ids=str,
)
def test_slurm_starts_lost_processes_again(programs, tmp_path, codes, runs, code):
    program, run = programs
    (tmp_path / "codes").write_text("\n".join(map(str, codes)))
    program("srun", "echo run >> runs; code=$(head -n1 codes); sed -i 1d codes; exit $code")
    done = run(str(FOLDER / "slurm.sh"), "configs/digits.yaml", SLURM_JOB_ID="4711")
    assert done.returncode == code
    assert (tmp_path / "runs").read_text().count("run") == runs


def test_slurm_puts_a_job_that_ran_out_of_time_back_into_the_queue(programs, tmp_path):
    program, run = programs
    program("srun", "exit 143")
    program("scontrol", 'echo "$@" > requeued')
    assert run(str(FOLDER / "slurm.sh"), "configs/digits.yaml", SLURM_JOB_ID="4711").returncode == 143
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"


@pytest.mark.parametrize(
    "endpoints", ["10.0.0.1,10.0.0.2,10.0.0.3", "a:0:10.0.0.1,b:1:10.0.0.2,c:2:10.0.0.3"], ids=["hosts", "triples"]
)
def test_cloud_tpu(programs, tmp_path, endpoints):
    """The metadata server's answers, in both forms that jax/_src/clusters/cloud_tpu_cluster.py knows."""
    program, run = programs
    program("gcloud", 'printf "%s\\0" "$@" > gcloud_arguments')
    script = str(FOLDER / "cloud_tpu.sh")
    done = run(script, "tpu-1", "us-east1-d", "configs/digits.yaml", "name=a b", FOLDER=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    arguments = (tmp_path / "gcloud_arguments").read_text().split("\0")[:-1]
    *front, command = arguments
    assert front == [
        "compute",
        "tpus",
        "tpu-vm",
        "ssh",
        "tpu-1",
        "--zone",
        "us-east1-d",
        "--worker",
        "all",
        "--command",
    ]
    program("jdist", 'printf "%s\n" "$@" >&2; env')
    environments = []
    for number in range(3):
        program(
            "curl",
            f"""case "${{@: -1}}" in
*/instance/attributes/worker-network-endpoints) printf %s '{endpoints}' ;;
*/instance/attributes/agent-worker-number) printf %s {number} ;;
*) exit 22 ;;
esac""",
        )
        host = run("-c", command)
        assert host.returncode == 0, host.stderr
        assert host.stderr.splitlines() == [*COMMAND[1:], "name=a b"]
        environments.append(dict(line.partition("=")[::2] for line in host.stdout.splitlines()))
    found = specs(environments)
    assert {(spec.resolver, spec.coordinator_address) for spec in found} == {("jax_env", "10.0.0.1:8482")}


def test_cloud_tpu_off_a_tpu_says_so_and_does_not_train(programs, tmp_path):
    program, run = programs
    program("gcloud", 'printf "%s" "${@: -1}" > command')
    program("curl", "echo 'curl: (6) Could not resolve host' >&2; exit 6")
    program("jdist", "touch trained")
    run(str(FOLDER / "cloud_tpu.sh"), "tpu-1", "us-east1-d", "configs/digits.yaml", FOLDER=str(tmp_path))
    host = run("-c", (tmp_path / "command").read_text())
    assert host.returncode != 0
    assert "Could not resolve host" in host.stderr
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_its_arguments_says_how_it_is_used(name, programs):
    _, run = programs
    done = run(str(FOLDER / name))
    assert done.returncode != 0
    assert f"{name} " in done.stderr
    assert "CONFIG [KEY=VALUE ...]" in done.stderr
    assert os.access(FOLDER / name, os.X_OK)
