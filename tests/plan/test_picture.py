"""The picture of a plan: memory against the chip's, and the step's time by its parts."""

import dataclasses

import pytest

import jdist
from jdist.cli.main import main
from jdist.plan.compile import Memory, TooLarge
from jdist.plan.picture import draw, memory_parts
from jdist.plan.roofline import Estimate
from jdist.plan.table import Plan
from jdist.support.chips import chip_of
from tests.pictures import check_picture
from tests.plan.plan_toy import config_file

GIB = 2**30
ESTIMATES = tuple(
    Estimate(chips=chips, device_s=0.2, exchange_s=exchange, host_s=host, bound=bound)
    for chips, exchange, host, bound in (
        (8, 0.05, 0.0, "compute"),
        (64, 0.1, 0.0, "memory"),
        (512, None, 0.0, "compute"),
    )
)
PLAN = Plan(
    target="v5e:2x4",
    device_kind="TPU v5 lite",
    num_devices=8,
    global_batch=128,
    summary="mirrored\nglobal batch 128 = 8 replicas x 16",
    capacity=16 * GIB,
    state_bytes=6 * GIB,
    optimizer_bytes=4 * GIB,
    rows=16,
    memory=Memory(arguments=7 * GIB, outputs=6 * GIB, aliased=6 * GIB - 8, temporaries=3 * GIB, code=GIB, host=0),
    estimates=ESTIMATES,
    chip=chip_of("TPU v5 lite"),
)


def test_the_parts_are_all_of_the_memory():
    parts = {part.name.split(" ")[0].rstrip(":"): part.amount for part in memory_parts(PLAN)}
    expected = {
        "parameters": 2 * GIB,
        "optimiser's": 4 * GIB,
        "batch": GIB,
        "temporaries": 3 * GIB,
        "outputs": 8,
        "program": GIB,
    }
    assert parts == expected
    assert sum(parts.values()) == PLAN.memory.total


def test_what_fits():
    texts = check_picture(str(draw(PLAN)))
    assert "11.00 GiB of 16.00 GiB: fits, 5.00 GiB free" in texts
    assert "16.00 GiB, all there is" in texts
    assert "A: 2.00 GiB" in texts
    assert "the same, enlarged" not in texts
    # Step and parts of the chips that were planned for; a figure that nobody publishes is no time.
    assert {"250 ms", "300 ms", "A: 200 ms", "50 ms", "no public figure of the network, or of the host's link"} <= set(
        texts
    )
    assert "the chip's own work, bound by its arithmetic" in texts


def test_what_takes_little_is_drawn_enlarged():
    small = Memory(arguments=6 * 2**20, outputs=0, aliased=0, temporaries=10 * 2**20, code=0, host=0)
    plan = dataclasses.replace(PLAN, state_bytes=3 * 2**20, optimizer_bytes=2**20, memory=small)
    texts = check_picture(str(draw(plan)))
    assert "the same, enlarged" in texts
    assert "D: 10.00 MiB" in texts


def refused(needed, *, partly=False):
    refusal = TooLarge(message="m", needed=needed, available=None, partly=partly)
    return {"memory": None, "estimates": (), "refusal": refusal}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"capacity": 8 * GIB}, "11.00 GiB of 8.00 GiB: does not fit"),
        ({"capacity": None}, "11.00 GiB; the memory of this device is not known"),
        ({"estimates": (), "chip": None}, "no model: 'TPU v5 lite' has no public figures"),
        (refused(40 * GIB), "40.00 GiB of 16.00 GiB: does not fit"),
        (refused(40 * GIB, partly=True), "46.00 GiB of 16.00 GiB: does not fit"),
        (refused(None), "no model: nothing was compiled"),
    ],
)
def test_what_does_not_fit_or_is_not_known(change, text):
    assert text in check_picture(str(draw(dataclasses.replace(PLAN, **change))))


def test_a_real_plan_on_this_machine(tmp_path, capsys):
    file = tmp_path / "plan.svg"
    assert main(["plan", str(config_file(tmp_path)), "--topology", "cpu:8", "--no-check", "--svg", str(file)]) == 0
    assert "memory of each of 8 cpu devices" in capsys.readouterr().out
    texts = check_picture(file.read_text())
    assert "parameters and what else the state has" in texts
    assert "no model: 'cpu' has no public figures" in texts
    assert jdist.plan.draw is draw


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--svg", "a.png"], "its name must end in .svg"),
        (["--svg", "/missing/a.svg"], "the folder /missing does not exist"),
        (["--svg", "a.svg", "--sweep", "global_batch=8,16"], "--svg draws one plan"),
        (["--svg", "a.svg", "--suggest"], "--svg draws one plan"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused_before_anything_is_compiled(arguments, text, capsys):
    assert main(["plan", "configs/digits.yaml", "--topology", "cpu:8", *arguments]) == 2
    assert text in capsys.readouterr().err
