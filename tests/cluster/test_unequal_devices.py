"""Processes with different numbers of devices are refused at once, by all of them, with the counts."""

from tests.cluster.fault_jobs import BOUND_S, STEPS, Job

UNEQUAL = """\
import json, os
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={1 + index}"
"""


def test_unequal_numbers_of_devices_are_refused_with_the_counts(tmp_path):
    with Job(tmp_path, UNEQUAL + STEPS + "train(1)") as job:
        codes = job.codes(within_s=60 + BOUND_S)
        for index in (0, 1):
            said = "the processes have different numbers of devices: process 0 has 1, process 1 has 2."
            assert said in job.out(index), job.out(index)
        assert codes == [1, 1]  # a script's own end by an exception; `jdist run` leaves with 2
