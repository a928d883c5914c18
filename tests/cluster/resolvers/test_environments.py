"""Real environments: each rank finds its place, or is told by name what to write; none trains alone in silence."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

import jdist
from jdist.cluster import resolve
from jdist.cluster.resolvers.jax_env import derived_port
from jdist.errors import ClusterConfigError

Environ = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """An environment as it was seen.

    Attributes:
        name: what started the processes, and how.
        source: where its variables are from.
        ranks: how many processes it started.
        common: what all have.
        own: what each has, by rank.
        at: where process 0 is found; "" where it is refused.
        resolver: by which resolver.
        says: what the refusal says.
        only: the one variable that shows that there are several.
    """

    name: str
    source: str
    ranks: int
    common: Environ = field(default_factory=dict)
    own: Callable[[int], Environ] = lambda rank: {}
    at: str = ""
    resolver: str = ""
    says: tuple[str, ...] = ()
    only: str = ""

    def environ(self, rank: int) -> dict[str, str]:
        return {**self.common, **self.own(rank)}


def crc_port(text: str) -> int:
    return derived_port(zlib.crc32(text.encode()))


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "8", "SM_MODEL_DIR": "/opt"}
OMPI_URI = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
VERTEX = {
    "workerpool0": ["cmle-training-workerpool0-1d969d3ba6-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-1d969d3ba6-0:2222", "cmle-training-workerpool1-1d969d3ba6-1:2222"],
}
ALLOCATION = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
}


def ompi(rank: int, ranks: int, on_host: int) -> Environ:
    return {
        "OMPI_COMM_WORLD_SIZE": str(ranks),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(on_host),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % on_host),
    }


def torch(rank: int, ranks: int, on_host: int) -> Environ:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % on_host),
        "LOCAL_WORLD_SIZE": str(on_host),
        "GROUP_RANK": str(rank // on_host),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def srun(rank: int, ranks: int, on_node: int) -> Environ:
    nodes = ranks // on_node
    return ALLOCATION | {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": f"{on_node}(x{nodes})",
        "SLURM_NTASKS": str(ranks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % on_node),
        "SLURM_NODEID": str(rank // on_node),
    }


SLURM_PORT = derived_port(7 * 1731344)

FOUND = [
    Row(
        # aws/sagemaker-training-toolkit, src/sagemaker_training/mpi.py: `mpirun --host algo-1:8,algo-2:8 -x SM_HOSTS
        # -x SM_CURRENT_HOST ...`, so that all ranks have the master's SM_CURRENT_HOST.
        name="SageMaker's mpirun",
        source="https://github.com/aws/sagemaker-training-toolkit/blob/master/src/sagemaker_training/mpi.py",
        ranks=16,
        common=SAGEMAKER | {"OMPI_MCA_orte_hnp_uri": OMPI_URI, "NCCL_DEBUG": "INFO"},
        own=lambda rank: ompi(rank, 16, 8),
        at="algo-1:2223",
        resolver="open_mpi",
    ),
    Row(
        # The same toolkit's torch_distributed.py: `torchrun --nnodes 2 --nproc_per_node 8 --master_addr algo-1 ...`
        name="SageMaker's torchrun",
        source="https://github.com/aws/sagemaker-training-toolkit/blob/master/src/sagemaker_training/torch_distributed.py",
        ranks=16,
        common={"SM_HOSTS": SAGEMAKER["SM_HOSTS"], "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"},
        own=lambda rank: torch(rank, 16, 8) | {"SM_CURRENT_HOST": f"algo-{1 + rank // 8}"},
        at=f"algo-1:{derived_port(7777)}",
        resolver="torchrun",
    ),
    Row(
        # Wrappers in public repositories set them from Slurm's, for programs that know Open MPI alone: `export
        # OMPI_COMM_WORLD_RANK=$SLURM_PROCID OMPI_COMM_WORLD_SIZE=$SLURM_NTASKS ...`. Nothing says where mpirun runs.
        name="srun that also sets OMPI_, as on Frontier",
        source="a report from Frontier; wrappers of Slurm's tasks",
        ranks=16,
        own=lambda rank: srun(rank, 16, 8) | ompi(rank, 16, 8),
        at=f"n1:{SLURM_PORT}",
        resolver="slurm",
    ),
    Row(
        name="srun that also sets OMPI_COMM_WORLD_SIZE alone",
        source="batch scripts of CASA's users: `export OMPI_COMM_WORLD_SIZE=$SLURM_NTASKS`",
        ranks=4,
        own=lambda rank: srun(rank, 4, 2) | {"OMPI_COMM_WORLD_SIZE": "4"},
        at=f"n1:{SLURM_PORT}",
        resolver="slurm",
    ),
    Row(
        # Slurm's plug-in mpi/pmi2 sets PMI_RANK and PMI_SIZE in each task.
        name="srun --mpi=pmi2",
        source="https://github.com/SchedMD/slurm/blob/master/src/plugins/mpi/pmi2/mpi_pmi2.c",
        ranks=4,
        own=lambda rank: srun(rank, 4, 2) | {"PMI_RANK": str(rank), "PMI_SIZE": "4", "PMI_JOBID": "1731344.0"},
        at=f"n1:{SLURM_PORT}",
        resolver="slurm",
    ),
    Row(
        # torchrun, "Environment variables"; the agent of node 0 listens at MASTER_PORT
        # (torch/distributed/rendezvous.py, _torchelastic_use_agent_store).
        name="torchrun on two hosts, one agent a node started by srun",
        source="https://docs.pytorch.org/docs/stable/elastic/run.html",
        ranks=8,
        common={"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        own=lambda rank: srun(rank // 4, 2, 1) | torch(rank, 8, 4),
        at=f"n1:{derived_port(29500)}",
        resolver="torchrun",
    ),
    Row(
        name="torchrun --standalone",
        source="https://docs.pytorch.org/docs/stable/elastic/run.html",
        ranks=4,
        common={"MASTER_ADDR": "localhost", "MASTER_PORT": "40321"},
        own=lambda rank: torch(rank, 4, 4),
        at=f"localhost:{crc_port('40321')}",
        resolver="torchrun",
    ),
    Row(
        # kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go and master.go
        name="PyTorchJob",
        source="https://github.com/kubeflow/training-operator/blob/v1.7.0/pkg/controller.v1/pytorch/envvar.go",
        ranks=3,
        common=POD
        | {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "PYTHONUNBUFFERED": "0"},
        own=lambda rank: {"RANK": str(rank)},
        at="job-master-0:23456",
        resolver="torchrun",
    ),
    Row(
        # PyTorchJob with nprocPerNode, and Kubeflow Trainer's torch runtimes, mean torchrun to be run; here it was not.
        name="PyTorchJob with nprocPerNode, without torchrun",
        source="https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go",
        ranks=2,
        common=POD
        | {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "8",
            "PET_MASTER_ADDR": "job-node-0-0.job",
            "PET_MASTER_PORT": "29500",
        },
        own=lambda rank: {"PET_NODE_RANK": str(rank), "JOB_COMPLETION_INDEX": str(rank)},
        at="job-node-0-0.job:29500",
        resolver="torchrun",
    ),
    Row(
        # kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go
        name="LeaderWorkerSet",
        source="https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/",
        ranks=4,
        common=POD | {"LWS_LEADER_ADDRESS": "my-lws-0.my-lws.default", "LWS_GROUP_SIZE": "4"},
        own=lambda rank: {"LWS_WORKER_INDEX": str(rank)},
        at="my-lws-0.my-lws.default:2223",
        resolver="leader_worker_set",
    ),
    Row(
        # submitit 1.5.4, submitit/local/local.py, `start_controller` and `Controller.start_tasks`
        name="submitit's local executor",
        source="https://github.com/facebookincubator/submitit/blob/main/submitit/local/local.py",
        ranks=2,
        common={
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": "4711",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_NTASKS": "2",
        },
        own=lambda rank: {"SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank)},
        at=f"localhost:{crc_port('4711')}",
        resolver="submitit",
    ),
    Row(
        # SkyPilot, "Distributed multi-node jobs", "Environment variables"
        name="SkyPilot",
        source="https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html",
        ranks=3,
        common={
            "SKYPILOT_NODE_IPS": "172.31.8.8\n172.31.8.9\n172.31.8.10",
            "SKYPILOT_NUM_NODES": "3",
            "SKYPILOT_NUM_GPUS_PER_NODE": "8",
            "SKYPILOT_TASK_ID": "sky-2026-01-02-03-04-05-000000_train_1",
        },
        own=lambda rank: {"SKYPILOT_NODE_RANK": str(rank)},
        at=f"172.31.8.8:{crc_port('sky-2026-01-02-03-04-05-000000_train_1')}",
        resolver="skypilot",
    ),
    Row(
        # googleapis/python-aiplatform, tests/unit/aiplatform/test_pytorch_plugin.py has this value
        name="Vertex AI's CLUSTER_SPEC",
        source="https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables",
        ranks=3,
        own=lambda rank: {
            "CLUSTER_SPEC": json.dumps(
                {
                    "cluster": VERTEX,
                    "environment": "cloud",
                    "task": {"type": f"workerpool{min(rank, 1)}", "index": max(0, rank - 1)},
                    "job": '{"python_module":"","package_uris":[],"job_args":[]}',
                }
            )
        },
        at="cmle-training-workerpool0-1d969d3ba6-0:2222",
        resolver="vertex",
        only="CLUSTER_SPEC",
    ),
    Row(
        # hydra sets PMI_RANK and PMI_SIZE, MPI_LOCALNRANKS and MPI_LOCALRANKID: `mpiexec -n 4 env`
        name="MPICH's mpiexec on one host",
        source="https://github.com/pmodels/mpich/blob/main/src/pm/hydra/proxy/pmip_cb.c",
        ranks=4,
        common={"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "PMI_FD": "6", "GFORTRAN_UNBUFFERED_PRECONNECTED": "y"},
        own=lambda rank: {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)},
        at=f"localhost:{crc_port('')}",
        resolver="mpi",
    ),
    Row(
        name="Intel MPI's mpiexec through srun's proxies, told where rank 0 is",
        source="https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux (`-genv`)",
        ranks=8,
        common={"PMI_SIZE": "8", "MPI_LOCALNRANKS": "4", "JAX_COORDINATOR_ADDRESS": "n1:7000"},
        own=lambda rank: srun(rank // 4, 2, 1) | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank % 4)},
        at="n1:7000",
        resolver="mpi",
    ),
    Row(
        # mvapich2, src/pm/mpirun/src/slurm/... mpispawn.c, setup_local_environment
        name="MVAPICH2's mpirun_rsh on one host",
        source="https://mvapich.cse.ohio-state.edu/userguide/ (MV2_COMM_WORLD_LOCAL_RANK)",
        ranks=2,
        common={"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "2", "PBS_JOBID": "77.pbs"},
        own=lambda rank: {
            "MV2_COMM_WORLD_RANK": str(rank),
            "MV2_COMM_WORLD_LOCAL_RANK": str(rank),
            "PMI_ID": str(rank),
        },
        at=f"localhost:{crc_port('77.pbs')}",
        resolver="mpi",
    ),
    Row(
        name="PALS' mpiexec on one host",
        source="https://docs.alcf.anl.gov/aurora/running-jobs-aurora/",
        ranks=12,
        common={
            "PALS_LOCAL_SIZE": "12",
            "PMI_SIZE": "12",
            "PALS_APID": "6f",
            "PALS_NODEID": "0",
            "PMI_LOCAL_SIZE": "12",
        },
        own=lambda rank: {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(rank), "PMI_RANK": str(rank)},
        at=f"localhost:{crc_port('6f')}",
        resolver="mpi",
    ),
    Row(
        # `bsub -n 2 -R "span[ptile=1]" blaunch ...` with `--node_rank=$((LSF_PM_TASKID - 1))` and the first of LSB_HOSTS
        name="LSF's blaunch, one slot a host",
        source="https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-variable-reference",
        ranks=2,
        common={"LSB_JOBID": "1234", "LSB_MCPU_HOSTS": "p10-r01 1 p10-r02 1", "LSB_HOSTS": "p10-r01 p10-r02"},
        own=lambda rank: {"LSF_PM_TASKID": str(rank + 1)},
        at=f"p10-r01:{derived_port(1234)}",
        resolver="lsf",
    ),
    Row(
        # jax/_src/test_multiprocess.py starts its processes so; libtpu listens at the ports that are listed.
        name="eight TPU processes on a host",
        source="https://github.com/jax-ml/jax/blob/main/jax/_src/test_multiprocess.py",
        ranks=8,
        common={
            "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{8476 + i}" for i in range(8)),
            "TPU_PROCESS_BOUNDS": "2,4,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        },
        own=lambda rank: {
            "CLOUD_TPU_TASK_ID": str(rank),
            "TPU_VISIBLE_CHIPS": str(rank),
            "TPU_PROCESS_PORT": str(8476 + rank),
        },
        at="localhost:8484",
        resolver="tpu",
    ),
    Row(
        # jax/_src/clusters/cloud_tpu_cluster.py: without MEGASCALE_NUM_SLICES there is one slice
        name="MEGASCALE_COORDINATOR_ADDRESS alone",
        source="https://github.com/jax-ml/jax/blob/main/jax/_src/clusters/cloud_tpu_cluster.py",
        ranks=2,
        common=POD | {"TPU_WORKER_HOSTNAMES": "t-0.tpu,t-1.tpu", "MEGASCALE_COORDINATOR_ADDRESS": "t-0.tpu:8080"},
        own=lambda rank: {"TPU_WORKER_ID": str(rank)},
        at="t-0.tpu:8482",
        resolver="tpu",
    ),
]

REFUSED = [
    Row(
        # mpirun hands OMPI_MCA_ on to all ranks; it runs in the launcher's pod, where there is no rank.
        name="MPIJob's ranks on two workers",
        source="https://github.com/kubeflow/mpi-operator/blob/master/pkg/controller/mpi_job_controller.go",
        ranks=4,
        common={"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "OMPI_MCA_orte_hnp_uri": OMPI_URI},
        own=lambda rank: ompi(rank, 4, 2),
        says=("Open MPI's mpirun", "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ),
    Row(
        # As above where the job names hosts itself, `mpirun --host JOB-worker-0,JOB-worker-1`.
        name="MPIJob's ranks, with a list of hosts of the job's own",
        source="https://github.com/kubeflow/mpi-operator/blob/master/pkg/controller/mpi_job_controller.go",
        ranks=4,
        common={"OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_orte_hnp_uri": OMPI_URI},
        own=lambda rank: ompi(rank, 4, 2),
        says=("Open MPI's mpirun", "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ),
    Row(
        name="MPIJob's launcher pod, without mpirun",
        source="https://github.com/kubeflow/mpi-operator/blob/master/pkg/controller/mpi_job_controller.go",
        ranks=1,
        common=POD | {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "K_MPI_JOB_ROLE": "launcher"},
        says=("K_MPI_JOB_ROLE", "MPIJob", "mpirun -x JAX_COORDINATOR_ADDRESS=JOB-worker-0.JOB:PORT"),
    ),
    Row(
        # Recorded on a cluster with LaunchParameters=use_interactive_step: Slurm's own step is 0xfffffffa, with one task.
        name="the shell of salloc -N2 -n16",
        source="https://slurm.schedmd.com/slurm.conf.html#OPT_use_interactive_step",
        ranks=1,
        common=ALLOCATION
        | {
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NODELIST": "n1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_NTASKS": "16",
            "SLURM_TASKS_PER_NODE": "8(x2)",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
        says=("SLURM_NTASKS is '16'; it must be 1 here", "srun", "mirrored"),
    ),
    Row(
        name="sbatch -N4, without srun",
        source="https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES",
        ranks=1,
        common={
            "SLURM_JOB_ID": "9",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_NNODES": "4",
            "SLURM_TASKS_PER_NODE": "64(x4)",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
        },
        says=("SLURM_JOB_NUM_NODES is '4'; it must be 1 here", "srun"),
    ),
    Row(
        # slurmd/slurmstepd/mgr.c, _exec_task: SLURM_PROCID counts on over the components, SLURM_JOB_ID is the first one's;
        # the lists are each component's own.
        name="a step of a heterogeneous job",
        source="https://slurm.schedmd.com/heterogeneous_jobs.html",
        ranks=6,
        own=lambda rank: (
            srun(rank % 4, (4, 2)[rank // 4], 2)
            | {"SLURM_HET_SIZE": "2", "SLURM_PROCID": str(rank), "SLURM_JOB_ID_HET_GROUP_0": "1731344"}
        ),
        only="SLURM_HET_SIZE",
        says=("SLURM_HET_SIZE is 2", "heterogeneous", "JAX_PROCESS_ID=$SLURM_PROCID", "JAX_NUM_PROCESSES"),
    ),
    Row(
        # With -pmi-port hydra sets PMI_PORT and PMI_ID in place of PMI_FD, PMI_RANK and PMI_SIZE.
        name="hydra's PMI_ID",
        source="https://github.com/pmodels/mpich/blob/v3.4/src/pm/hydra/pm/pmiserv/pmip_cb.c",
        ranks=4,
        common={"PMI_PORT": "n1:40001"},
        own=lambda rank: {"PMI_ID": str(rank)},
        only="PMI_ID",
        says=("PMI_ID", "hydra", "JAX_NUM_PROCESSES", "$PMI_ID"),
    ),
    Row(
        name="AWS Batch, a multi-node parallel job",
        source="https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html",
        ranks=2,
        common={"AWS_BATCH_JOB_ID": "5a", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0", "AWS_BATCH_JOB_NUM_NODES": "2"},
        own=lambda rank: {"AWS_BATCH_JOB_NODE_INDEX": str(rank)},
        only="AWS_BATCH_JOB_NUM_NODES",
        says=("AWS_BATCH_JOB_NUM_NODES is '2'", "JAX_COORDINATOR_ADDRESS"),
    ),
    Row(
        name="horovodrun over gloo",
        source="https://github.com/horovod/horovod/blob/master/horovod/runner/gloo_run.py",
        ranks=4,
        common={"HOROVOD_SIZE": "4", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"},
        own=lambda rank: {"HOROVOD_RANK": str(rank)},
        only="HOROVOD_SIZE",
        says=("HOROVOD_SIZE is '4'", "$HOROVOD_RANK"),
    ),
    Row(
        name="Flux without its PMI, on two nodes",
        source="https://github.com/flux-framework/flux-core/blob/master/doc/man7/flux-environment.rst",
        ranks=4,
        common={"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2"},
        own=lambda rank: {"FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank % 2)},
        says=("Flux does not tell", "flux run --env=JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ),
    Row(
        name="Flux with its PMI, on two nodes",
        source="https://github.com/flux-framework/flux-core/blob/master/doc/man7/flux-environment.rst",
        ranks=4,
        common={"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "PMI_SIZE": "4", "PMI_FD": "9"},
        own=lambda rank: {"FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank % 2), "PMI_RANK": str(rank)},
        says=("Flux does not tell", "flux run --env=JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ),
    Row(
        name="Azure ML's PyTorch jobs, a rank for each GPU",
        source="https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu (Process initialization)",
        ranks=4,
        common={"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "WORLD_SIZE": "4"},
        own=lambda rank: {"RANK": str(rank), "NODE_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2)},
        says=("LOCAL_WORLD_SIZE is not set", "LOCAL_RANK alone does not tell", "JAX_LOCAL_DEVICE_IDS"),
    ),
    Row(
        name="srun of torchrun without --nnodes",
        source="https://docs.pytorch.org/docs/stable/elastic/run.html",
        ranks=2,
        common={"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        own=lambda rank: srun(rank, 2, 1) | torch(0, 1, 1),
        says=("WORLD_SIZE is 1", "srun has started torchrun 2 times", "--nnodes=2", "mirrored"),
    ),
    Row(
        name="Intel MPI's mpiexec on two hosts",
        source="https://github.com/pmodels/mpich/blob/main/src/pm/hydra/proxy/pmip_cb.c",
        ranks=8,
        common={"PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"},
        own=lambda rank: {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank % 4)},
        says=("hydra", "Intel MPI", "mpiexec -genv JAX_COORDINATOR_ADDRESS HOST:PORT"),
    ),
    Row(
        name="MVAPICH2's mpirun_rsh on two hosts",
        source="https://mvapich.cse.ohio-state.edu/userguide/ (mpispawn.c, setup_local_environment)",
        ranks=4,
        common={"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
        own=lambda rank: {
            "MV2_COMM_WORLD_RANK": str(rank),
            "MV2_COMM_WORLD_LOCAL_RANK": str(rank % 2),
            "PMI_ID": str(rank),
        },
        says=("MVAPICH2", "JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ),
    Row(
        name="PALS' mpiexec on two hosts",
        source="https://docs.alcf.anl.gov/aurora/running-jobs-aurora/",
        ranks=4,
        common={"PALS_LOCAL_SIZE": "2", "PMI_SIZE": "4", "PALS_APID": "6f"},
        own=lambda rank: {
            "PALS_RANKID": str(rank),
            "PALS_LOCAL_RANKID": str(rank % 2),
            "PALS_NODEID": str(rank // 2),
            "PMI_RANK": str(rank),
        },
        says=("PALS", "mpiexec --env JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ),
    Row(
        name="PALS without PMI",
        source="https://docs.alcf.anl.gov/aurora/running-jobs-aurora/",
        ranks=4,
        common={"PALS_LOCAL_SIZE": "2"},
        own=lambda rank: {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(rank % 2)},
        only="PALS_RANKID",
        says=("PMI_SIZE is not set", "PALS"),
    ),
    Row(
        # Lightning-AI/pytorch-lightning, src/lightning/fabric/plugins/environments/lsf.py
        name="LSF's jsrun",
        source="https://docs.olcf.ornl.gov/systems/summit_user_guide.html#job-launcher-jsrun",
        ranks=4,
        common={"LSB_JOBID": "1234", "LSB_MCPU_HOSTS": "batch5 1 h36n03 42 h36n04 42", "JSM_NAMESPACE_SIZE": "4"},
        own=lambda rank: {"JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_LOCAL_RANK": str(rank % 2)},
        says=("LSF's jsrun", "jsrun -E JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ),
    Row(
        name="LSF's blaunch, several slots a host",
        source="https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-blaunch",
        ranks=4,
        common={"LSB_JOBID": "1234", "LSB_MCPU_HOSTS": "hostA 2 hostB 2"},
        own=lambda rank: {"LSF_PM_TASKID": str(rank + 1)},
        says=("LSB_MCPU_HOSTS", "blaunch", "span[ptile=1]", "JAX_NUM_PROCESSES"),
    ),
    Row(
        name="bsub on two hosts, without blaunch",
        source="https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-variable-reference",
        ranks=1,
        common={"LSB_JOBID": "1234", "LSB_MCPU_HOSTS": "hostA 2 hostB 2"},
        says=("LSB_MCPU_HOSTS", "one host here", "blaunch"),
    ),
    Row(
        name="PyTorchJob with an elastic policy, without torchrun",
        source="https://github.com/kubeflow/training-operator/blob/v1.7.0/pkg/controller.v1/pytorch/elastic.go",
        ranks=2,
        common=POD | {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "job-worker-0:29400", "PET_RDZV_BACKEND": "c10d"},
        only="PET_NNODES",
        says=("PET_NNODES", "torchrun"),
    ),
    Row(
        name="torchrun --master-addr localhost on two hosts",
        source="https://docs.pytorch.org/docs/stable/elastic/run.html",
        ranks=4,
        common={"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        own=lambda rank: torch(rank, 4, 2),
        says=("MASTER_ADDR is 'localhost'", "--master-addr"),
    ),
    Row(
        name="a TF_CONFIG without `cluster`",
        source="https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable",
        ranks=2,
        common={"TF_CONFIG": '{"worker": ["a:2222", "b:2222"]}'},
        only="TF_CONFIG",
        says=("TF_CONFIG: `worker`", "inside of `cluster`", '{"cluster": {"worker": ["a:2222", "b:2222"]}'),
    ),
    Row(
        # As the TPU VMs of a queued resource have them in /etc/environment (axlearn, gcp/jobs/tpu_runner.py)
        name="several slices whose hosts the metadata server alone knows",
        source="https://cloud.google.com/tpu/docs/multislice-introduction",
        ranks=2,
        common={"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.2:8080", "MEGASCALE_NUM_SLICES": "2"},
        own=lambda rank: {"MEGASCALE_SLICE_ID": str(rank)},
        says=("MEGASCALE_NUM_SLICES", "TPU_WORKER_HOSTNAMES", "configs/cluster/cloud_tpu.sh"),
    ),
]

ALONE = [
    Row(name="a laptop", source="", ranks=1, common={"HOME": "/home/me", "PATH": "/bin"}),
    Row(
        name="Colab",
        source="https://colab.research.google.com (`!env`)",
        ranks=1,
        common={"COLAB_RELEASE_TAG": "release-colab_20260101", "COLAB_GPU": "1", "CLOUDSDK_PYTHON": "python3"},
    ),
    Row(
        # torch_xla takes `TPU_PROCESS_ADDRESSES=local` out of it by hand
        name="a TPU of Kaggle",
        source="https://www.kaggle.com/docs/tpu",
        ranks=1,
        common={
            "TPU_PROCESS_ADDRESSES": "local",
            "CLOUD_TPU_TASK_ID": "0",
            "TPU_WORKER_ID": "0",
            "KAGGLE_KERNEL_RUN_TYPE": "x",
        },
    ),
    Row(
        name="a pod with WORLD_SIZE=1",
        source="https://github.com/kubeflow/training-operator/blob/v1.7.0/pkg/controller.v1/pytorch/envvar.go",
        ranks=1,
        common=POD
        | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PET_NNODES": "1"},
    ),
    Row(
        # All eight GPUs are this process's: WORLD_SIZE counts processes that torchrun would have started.
        name="a PyTorchJob of one pod with nprocPerNode, without torchrun",
        source="https://github.com/kubeflow/training-operator/blob/v1.8.0/pkg/controller.v1/pytorch/envvar.go",
        ranks=1,
        common=POD
        | {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
        | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "job-master-0"}
        | {"PET_MASTER_PORT": "23456"},
    ),
    Row(
        # Recorded: SLURM_TASKS_PER_NODE counts CPUs where no tasks were asked for.
        name="the shell of salloc -N1 with eight CPUs",
        source="https://slurm.schedmd.com/slurm.conf.html#OPT_use_interactive_step",
        ranks=1,
        common={
            "SLURM_JOB_ID": "1731344",
            "SLURM_JOB_NODELIST": "GPU71E4",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_MPI_TYPE": "pmix",
            "SLURM_NNODES": "1",
            "SLURM_NODELIST": "GPU71E4",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEPID": "4294967290",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NODELIST": "GPU71E4",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_TASKS_PER_NODE": "8",
            "SLURM_PMIX_MAPPING_SERV": "(vector,(0,1,1))",
        },
    ),
    Row(
        name="srun -n1 --pty jupyter in an allocation of two nodes",
        source="https://slurm.schedmd.com/srun.html",
        ranks=1,
        common=srun(0, 1, 1) | {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"},
    ),
    Row(
        name="bsub -n 16 on one host",
        source="https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-variable-reference",
        ranks=1,
        common={"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "hostA 16", "LSB_DJOB_NUMPROC": "16", "LSF_PM_TASKID": "1"},
    ),
    Row(name="mpiexec -n 1", source="", ranks=1, common={"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}),
    Row(
        name="one node of SkyPilot",
        source="https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html",
        ranks=1,
        common={"SKYPILOT_NODE_IPS": "172.31.8.8", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"},
    ),
    Row(
        name="a LeaderWorkerSet of one",
        source="https://lws.sigs.k8s.io",
        ranks=1,
        common=POD | {"LWS_LEADER_ADDRESS": "s-0.s.default", "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
    ),
    Row(
        name="one host of SageMaker", source="", ranks=1, common={"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    ),
    Row(
        name="one replica of Vertex AI",
        source="https://github.com/googleapis/python-aiplatform (test_cloud_profiler.py)",
        ranks=1,
        common={"CLUSTER_SPEC": '{"cluster":{"chief":["localhost:1234"]},"task":{"type":"chief","index":0}}'},
    ),
]


def each(rows: list[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])


def place(environ: Environ) -> tuple[int, int] | str:
    """How many processes there are and which this is; the refusal."""
    try:
        spec = resolve(environ)
    except ClusterConfigError as exc:
        return str(exc)
    return spec.num_processes, spec.process_index


@each(FOUND)
def test_each_rank_finds_its_place(row):
    specs = [resolve(row.environ(rank)) for rank in range(row.ranks)]
    assert [spec.process_index for spec in specs] == list(range(row.ranks))
    assert {spec.num_processes for spec in specs} == {row.ranks}
    assert {spec.coordinator_address for spec in specs} == {row.at}
    assert {spec.resolver for spec in specs} == {row.resolver}
    assert specs[0].address == row.at


@each(REFUSED)
def test_each_rank_is_told_what_to_write(row):
    for rank in range(row.ranks):
        with pytest.raises(ClusterConfigError) as info:
            resolve(row.environ(rank))
        assert not [text for text in row.says if text not in str(info.value)], str(info.value)


@each([row for row in REFUSED if row.ranks > 1 and "TF_CONFIG" not in row.common])
def test_three_variables_mend_each_refusal(row):
    three = {"JAX_COORDINATOR_ADDRESS": "n1:7000", "JAX_NUM_PROCESSES": str(row.ranks)}
    places = [place(row.environ(rank) | three | {"JAX_PROCESS_ID": str(rank)}) for rank in range(row.ranks)]
    assert places == [(row.ranks, rank) for rank in range(row.ranks)]


@each(ALONE)
def test_one_process_stays_one_without_a_word(row, monkeypatch):
    for name, value in row.common.items():
        monkeypatch.setenv(name, value)
    assert place(row.common) == (1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jdist.distribute(lambda state, batch: state, jdist.mirrored())


@each([row for row in FOUND + REFUSED if row.ranks > 1])
def test_a_variable_less_makes_no_other_cluster(row):
    right = [(row.ranks, rank) for rank in range(row.ranks)]
    for missing in sorted(set(row.environ(0)) - {row.only}):
        left = [{k: v for k, v in row.environ(rank).items() if k != missing} for rank in range(row.ranks)]
        places = [place(environ) for environ in left]
        told = [found for found in places if isinstance(found, str)]
        wrong = [found for found, own in zip(places, right, strict=True) if found not in (own, (1, 0), *told)]
        assert not wrong, f"without {missing}: {wrong}"
        assert places == right or told, f"without {missing} each trains alone"


@each(FOUND + REFUSED)
def test_each_names_where_it_is_from(row):
    assert row.source
