"""What the resolvers refuse: the variable by its name, its value, what is allowed."""

import pytest

from jdist.cluster import (
    jax_env,
    kubernetes,
    leader_worker_set,
    lsf,
    open_mpi,
    sagemaker,
    skypilot,
    slurm,
    torchrun,
    tpu,
    vertex,
)
from jdist.errors import ClusterConfigError
from tests.cluster.resolvers.test_platforms import (
    JAX,
    JAX_JOB,
    LSF,
    LWS,
    MULTISLICE,
    NOTE,
    OPEN_MPI,
    POD,
    SAGEMAKER,
    SKY,
    SLICE,
    TORCH,
    TRAINER,
    cluster_spec,
)
from tests.cluster.resolvers.test_slurm import STEP as SLURM_STEP

# A resolver, the variables it takes, and changes of these (None: not set) with words of the refusal.
REFUSED = [
    (
        jax_env,
        JAX,
        [
            *(({missing: ""}, f"{missing} is not set.*together on every process") for missing in JAX),
            *(({missing: None}, f"{missing} is not set.*together on every process") for missing in JAX),
            ({"JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES is .*a whole number of at least 1"),
            ({"JAX_NUM_PROCESSES": "three"}, "JAX_NUM_PROCESSES is .*a whole number of at least 1"),
            ({"JAX_NUM_PROCESSES": "3.0"}, "JAX_NUM_PROCESSES is .*a whole number of at least 1"),
            ({"JAX_NUM_PROCESSES": "99999999999999"}, "JAX_NUM_PROCESSES is .*at most 100000"),
            ({"JAX_PROCESS_ID": "3"}, "JAX_PROCESS_ID is .*from 0 to 2, as JAX_NUM_PROCESSES says that there are 3"),
            ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID is .*a whole number of at least 0"),
            ({"JAX_COORDINATOR_ADDRESS": "a"}, "JAX_COORDINATOR_ADDRESS is .*host:port"),
            ({"JAX_COORDINATOR_ADDRESS": "http://a:1"}, "JAX_COORDINATOR_ADDRESS is .*Leave out"),
            ({"JAX_LOCAL_DEVICE_IDS": "0,x"}, "JAX_LOCAL_DEVICE_IDS is .*whole numbers with commas"),
            ({"JAX_LOCAL_DEVICE_IDS": "0,0"}, "JAX_LOCAL_DEVICE_IDS is .*each once"),
        ],
    ),
    (
        open_mpi,
        OPEN_MPI,
        [
            ({"OMPI_MCA_orte_hnp_uri": ""}, "JAX_COORDINATOR_ADDRESS is not set.*mpirun -x JAX_COORDINATOR_ADDRESS="),
            (
                {"SM_HOSTS": '["a b"]', "SM_CURRENT_HOST": "a b"},
                "SM_CURRENT_HOST is 'a b'; it must be the name or address of process 0's host",
            ),
            ({"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set"),
            ({"OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE is '0'"),
            ({"OMPI_COMM_WORLD_SIZE": "9999999999"}, "at most 100000"),
            ({"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK is not set"),
            ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4; it must be from 0 to 3"),
            ({"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
            ({"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 5; it must be at most"),
            ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK is 2; it must be from 0 to 1"),
            ({"OMPI_MCA_orte_hnp_uri": "nonsense"}, "OMPI_MCA_orte_hnp_uri is 'nonsense'"),
            ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://a b:1"}, "OMPI_MCA_orte_hnp_uri is"),
        ],
    ),
    (
        sagemaker,
        SAGEMAKER,
        [
            ({"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS is .*a JSON list of hosts"),
            ({"SM_HOSTS": "[]"}, "SM_HOSTS is .*a JSON list of hosts"),
            ({"SM_HOSTS": "{}"}, "SM_HOSTS is .*a JSON list of hosts"),
            ({"SM_HOSTS": "[" * 100_000}, "SM_HOSTS is .*a JSON list of hosts"),
            ({"SM_HOSTS": "[1]"}, r"SM_HOSTS: `\[0\]` is 1; it must be the name or address of a host"),
            ({"SM_HOSTS": '["a", "b c"]'}, r"SM_HOSTS: `\[1\]` is 'b c'"),
            ({"SM_HOSTS": '["algo-2", "algo-2"]'}, r"SM_HOSTS: `\[1\]` is 'algo-2'; it must be there once only"),
            ({"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST is 'algo-3'; it must be one of the hosts"),
            ({"SM_CURRENT_HOST": ""}, "SM_CURRENT_HOST is not set"),
            *(
                ({"JAX_COORDINATOR_PORT": port}, "JAX_COORDINATOR_PORT is .*a port from 1 to 65535")
                for port in ("0", "65536", "x", "-1")
            ),
            (
                {"JAX_COORDINATOR_PORT": "9", "JAX_COORDINATOR_ADDRESS": "a:8"},
                "JAX_COORDINATOR_PORT is 9; it must be the port in .* a:8",
            ),
        ],
    ),
    (
        kubernetes,
        POD | TRAINER,
        [
            ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID is not set"),
            ({"JAX_PROCESS_ID": None}, "JAX_PROCESS_ID is not set"),
            ({"JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS is not set"),
            ({"JAX_NUM_PROCESSES": ""}, "JAX_NUM_PROCESSES is not set"),
            ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID is 4; it must be from 0 to 3"),
        ],
    ),
    (
        kubernetes,
        POD | JAX_JOB,
        [
            ({"COORDINATOR_PORT": "0"}, "COORDINATOR_PORT is '0'"),
            ({"COORDINATOR_ADDRESS": "a b"}, "COORDINATOR_ADDRESS is 'a b'"),
            ({"NUM_PROCESSES": "x"}, "NUM_PROCESSES is 'x'"),
            ({"PROCESS_ID": "2"}, "PROCESS_ID is 2"),
        ],
    ),
    (
        tpu,
        MULTISLICE,
        [
            ({"TPU_WORKER_HOSTNAMES": "a,,b"}, "TPU_WORKER_HOSTNAMES is ''"),
            ({"TPU_WORKER_HOSTNAMES": "a,b c"}, "TPU_WORKER_HOSTNAMES is 'b c'"),
            ({"TPU_WORKER_HOSTNAMES": "a,a"}, r"`\[1\]` is 'a'; it must be there once only"),
            ({"TPU_WORKER_ID": ""}, "TPU_WORKER_ID is not set"),
            ({"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID is 2; it must be from 0 to 1"),
            ({"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID is 'x'"),
            ({"MEGASCALE_NUM_SLICES": ""}, "MEGASCALE_NUM_SLICES is not set"),
            ({"MEGASCALE_NUM_SLICES": "0"}, "MEGASCALE_NUM_SLICES is '0'"),
            ({"MEGASCALE_NUM_SLICES": "99999999"}, "at most 10000"),
            ({"MEGASCALE_SLICE_ID": ""}, "MEGASCALE_SLICE_ID is not set"),
            ({"MEGASCALE_SLICE_ID": "3"}, "MEGASCALE_SLICE_ID is 3; it must be from 0 to 2"),
            ({"MEGASCALE_COORDINATOR_ADDRESS": ""}, "MEGASCALE_COORDINATOR_ADDRESS is not set"),
            ({"MEGASCALE_COORDINATOR_ADDRESS": "a/b:1"}, "MEGASCALE_COORDINATOR_ADDRESS is 'a/b:1'"),
        ],
    ),
    (
        slurm,
        SLURM_STEP,
        [
            ({"SLURM_PROCID": "5"}, "SLURM_PROCID is 5; it must be from 0 to 4, as SLURM_STEP_TASKS_PER_NODE"),
            ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
            ({"SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_NUM_TASKS is 6; it must be 5"),
            ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many'"),
            ({"SLURM_STEP_TASKS_PER_NODE": "2,3"}, "SLURM_STEP_TASKS_PER_NODE is '2,3'.*the 3 nodes"),
            ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE is not set.*3 nodes"),
            ({"SLURM_STEP_NODELIST": "t[3-1]"}, "SLURM_STEP_NODELIST is"),
            ({"SLURM_LOCALID": "0"}, "SLURM_LOCALID is 0; it must be 1, as SLURM_PROCID is 3"),
            ({"SLURM_DISTRIBUTION": "plane"}, "SLURM_DISTRIBUTION is 'plane'; it must be block or cyclic"),
            ({"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_DISTRIBUTION is 'arbitrary'; it must be block or cyclic"),
            ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
            ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x'"),
            ({"JAX_COORDINATOR_PORT": "65535"}, r"`worker\[1\]` is 't02n13:65537'.*port from 1 to 65535"),
        ],
    ),
]
ALL = [(resolver, base | changes, words) for resolver, base, rows in REFUSED for changes, words in rows]
ALL += [
    (tpu, SLICE | {"TPU_WORKER_ID": NOTE}, "TPU_WORKER_ID is not set"),
    (torchrun, TORCH | {"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'.*torchrun sets it"),
    (torchrun, TORCH | {"WORLD_SIZE": "999999"}, "at most 100000"),
    (torchrun, TORCH | {"RANK": "4"}, "RANK is 4; it must be from 0 to 3"),
    (torchrun, TORCH | {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is 5; it must be at most 4, the number of all"),
    (torchrun, TORCH | {"MASTER_ADDR": "a b"}, "MASTER_ADDR is 'a b'; it must be the name or address of process 0's"),
    (torchrun, TORCH | {"MASTER_ADDR": ""}, "JAX_COORDINATOR_ADDRESS is not set.*torchrun does not tell"),
    (torchrun, TORCH | {"MASTER_PORT": "0"}, "MASTER_PORT is '0'; it must be a port"),
    (
        leader_worker_set,
        LWS | {"LWS_LEADER_ADDRESS": "a b"},
        "LWS_LEADER_ADDRESS is 'a b'; it must be the name or address",
    ),
    (leader_worker_set, LWS | {"LWS_LEADER_ADDRESS": ""}, "LWS_LEADER_ADDRESS is not set"),
    (leader_worker_set, LWS | {"LWS_WORKER_INDEX": "2"}, "LWS_WORKER_INDEX is 2; it must be from 0 to 1"),
    (skypilot, SKY | {"SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES is 3; it must be 2, the number of addresses"),
    (skypilot, SKY | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.1"}, r"`\[1\]` is '10.0.0.1'; it must be there once"),
    (skypilot, SKY | {"SKYPILOT_NODE_IPS": "10.0.0.1\na/b"}, r"SKYPILOT_NODE_IPS: `\[1\]` is 'a/b'"),
    (skypilot, SKY | {"SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK is not set"),
    (lsf, LSF | {"LSF_PM_TASKID": "3"}, "LSF_PM_TASKID is 3; it must be from 1 to 2"),
    (lsf, LSF | {"LSB_MCPU_HOSTS": "a b"}, "LSB_MCPU_HOSTS is 'a b'; it must be hosts with their numbers of slots"),
    (lsf, LSF | {"LSB_JOBID": ""}, "LSB_JOBID is not set"),
    (vertex, {"CLUSTER_SPEC": "x"}, "CLUSTER_SPEC is 'x'; it must be a JSON object"),
    (vertex, cluster_spec(task=None), "CLUSTER_SPEC is .*with the objects `cluster` and `task`"),
    (vertex, cluster_spec(task={"type": "workerpool1", "index": 1}), "CLUSTER_SPEC: `task_index` is 1"),
    (vertex, cluster_spec(task={"type": "workerpool9", "index": 0}), "CLUSTER_SPEC: `task_type` is 'workerpool9'"),
    (vertex, cluster_spec(cluster={"workerpool7": ["a:1"]}), "CLUSTER_SPEC: `job` is 'workerpool7'"),
]


@pytest.mark.parametrize(("resolver", "environ", "words"), ALL)
def test_what_is_refused(resolver, environ, words):
    with pytest.raises(ClusterConfigError, match=words) as info:
        resolver({name: value for name, value in environ.items() if value is not None})
    if resolver is jax_env:
        assert info.value.variable == words.split()[0]
    assert info.value.variable in str(info.value)
    assert (info.value.value is None) == (" is not set" in str(info.value))
