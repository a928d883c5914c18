"""Slurm: its lists, places of tasks, ports, GPUs."""

import pytest

from jdist.cluster import slurm
from jdist.cluster.resolvers.slurm import expand_nodes, expand_tasks
from jdist.errors import ClusterConfigError

STEP = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "t02n13,t02n[41,43]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
PORT = 20000 + 2 * 700


@pytest.mark.parametrize(
    ("listed", "nodes"),
    [
        ("n1", ["n1"]),
        ("n[1,3]", ["n1", "n3"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2],m5,o[3-4,6]", ["n1", "n2", "m5", "o3", "o4", "o6"]),
        ("n[0001-0003],m5,o[009-011]", ["n0001", "n0002", "n0003", "m5", "o009", "o010", "o011"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
        ("n[1-2]-ib0,login", ["n1-ib0", "n2-ib0", "login"]),
        ("a-b.c_d", ["a-b.c_d"]),
    ],
)
def test_lists_of_nodes(listed, nodes):
    assert expand_nodes(listed, "X") == nodes


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("", "a list of nodes"),
        ("n1,", "a list of nodes"),
        ("n[1-2", "a list of nodes"),
        ("n1-2]", "a list of nodes"),
        ("n[]", "a list of nodes"),
        ("n[1-]", "a list of nodes"),
        ("n[[1]]", "a list of nodes"),
        ("n[1-2-3]", "a list of nodes"),
        ("n 1", "a list of nodes"),
        ("n[3-1]", "ascending ranges, unlike 3-1"),
        ("n[1-2],n2", "n2 is there twice"),
        ("n[1-999999999]", "at most 100000 nodes"),
        ("n[1-1000]m[1-1000]", "at most 100000 nodes"),
        ("n[1-99999],m[1-99999]", "at most 100000 nodes"),
    ],
)
def test_what_is_no_list_of_nodes(listed, message):
    with pytest.raises(ClusterConfigError, match=message) as info:
        expand_nodes(listed, "X")
    assert info.value.variable == "X"


@pytest.mark.parametrize(
    ("listed", "tasks"),
    [
        ("2", [2]),
        ("2,1,3", [2, 1, 3]),
        ("2(x2),1", [2, 2, 1]),
        ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]),
    ],
)
def test_tasks_per_node(listed, tasks):
    assert expand_tasks(listed, "X") == tasks


@pytest.mark.parametrize(
    "listed", ["", "0", "2(x0)", "x2", "2(x2", "2 (x2)", "-1", "2(x999999999)", "999999999", "1,,1"]
)
def test_what_is_no_number_of_tasks(listed):
    with pytest.raises(ClusterConfigError, match=r"X is .*; it must be"):
        expand_tasks(listed, "X")


def test_a_step():
    spec = slurm(STEP)
    assert spec.processes == tuple(
        f"{node}:{port}"
        for node, port in [
            ("t02n13", PORT),
            ("t02n13", PORT + 2),
            ("t02n41", PORT),
            ("t02n41", PORT + 2),
            ("t02n43", PORT),
        ]
    )
    assert (spec.process_index, spec.address, spec.resolver) == (3, f"t02n41:{PORT + 2}", "slurm")
    assert spec.local_device_ids is None
    assert dict(spec.origins) == {
        "jobs": "SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, SLURM_JOB_ID",
        "task_type": "SLURM_PROCID",
        "task_index": "SLURM_PROCID",
    }


def test_tasks_in_turns():
    spec = slurm({**STEP, "SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"})
    nodes = [address.split(":")[0] for address in spec.processes]
    assert nodes == ["t02n13", "t02n41", "t02n43", "t02n13", "t02n41"]


def test_one_task_a_node_needs_no_tasks_per_node():
    environ = {**STEP, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "", "SLURM_PROCID": "2"}
    assert slurm({**environ, "SLURM_LOCALID": "0"}).address == f"t02n43:{PORT}"


def test_older_names_of_the_counts():
    environ = {**STEP, "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    del environ["SLURM_STEP_NUM_TASKS"], environ["SLURM_STEP_TASKS_PER_NODE"]
    assert slurm(environ).processes == slurm(STEP).processes


def test_jobs_and_steps_have_ports_of_their_own():
    def port(job, step):
        return slurm({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).coordinator_address

    steps = [port(job, step) for job in (100, 101, 102) for step in range(7)]
    assert len(set(steps)) == len(steps)


def test_the_port_and_address_of_process_0_can_be_chosen():
    spec = slurm({**STEP, "JAX_COORDINATOR_PORT": "7000"})
    assert spec.processes[:2] == ("t02n13:7000", "t02n13:7002")
    spec = slurm({**STEP, "JAX_COORDINATOR_ADDRESS": "t02n13-ib0:7000"})
    assert spec.processes[:3] == ("t02n13-ib0:7000", "t02n13:7002", "t02n41:7000")


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_PROCID"])
def test_it_does_not_apply_outside_a_step(missing):
    assert slurm({name: value for name, value in STEP.items() if name != missing}) is None


@pytest.mark.parametrize("how", ["block", "block:cyclic", "block,Pack", "*:block", "unknown", ""])
def test_ways_to_place_tasks_node_after_node(how):
    assert slurm({**STEP, "SLURM_DISTRIBUTION": how}).processes == slurm(STEP).processes


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
        ({"SLURM_GPUS_ON_NODE": "2", "ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b"}, (1,)),
        ({"SLURM_GPUS_ON_NODE": "3", "CUDA_VISIBLE_DEVICES": "0,1,2", "JAX_PLATFORMS": "cpu"}, None),
    ],
    ids=str,
)
def test_which_gpus_the_second_of_two_tasks_takes(gpus, devices):
    spec = slurm({**STEP, **gpus})
    assert spec.local_device_ids == devices
    assert spec.origins.get("local_device_ids") == (devices and "SLURM_GPUS_ON_NODE, SLURM_LOCALID")


def test_a_task_alone_on_its_node_takes_all_gpus():
    environ = {**STEP, "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}
    assert slurm({**environ, "SLURM_GPUS_ON_NODE": "3", "CUDA_VISIBLE_DEVICES": "0,1,2"}).local_device_ids is None


@pytest.mark.parametrize("count", [1, 3])
def test_gpus_that_cannot_be_shared_equally(count):
    visible = ",".join(map(str, range(count)))
    with pytest.raises(
        ClusterConfigError, match=f"SLURM_GPUS_ON_NODE is {count}; it must be a multiple of the 2 tasks"
    ):
        slurm({**STEP, "SLURM_GPUS_ON_NODE": str(count), "CUDA_VISIBLE_DEVICES": visible})


def test_jobs_by_rank():
    spec = slurm({**STEP, "SLURM_PROCID": "3"}, jobs={"worker": 3, "ps": 1, "chief": 1})
    assert [len(addresses) for addresses in spec.jobs.values()] == [1, 3, 1]
    assert (spec.task_type, spec.task_index) == ("worker", 1)
    assert spec.jobs["chief"] == (f"t02n13:{PORT}",)
    assert spec.jobs["ps"] == (f"t02n13:{PORT + 2}",)


@pytest.mark.parametrize("jobs", [{}, {"worker": 4}, {"worker": 6}, {"master": 5}, {"worker": 6, "ps": -1}])
def test_jobs_that_do_not_add_up(jobs):
    with pytest.raises(ClusterConfigError, match=r"jobs is .*add up to the step's 5"):
        slurm(STEP, jobs=jobs)
