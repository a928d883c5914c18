import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jdist.errors import ConfigError
from jdist.experiment.record import open_folder, set_aside
from jdist.loop.report.curves import plot_curves
from jdist.loop.report.files import write_atomically
from jdist.loop.report.metrics_file import MetricsFile, read_rows


def write_rows(path, *steps):
    metrics = MetricsFile.open(path, step=max(steps))
    for step in steps:
        metrics.write(step, {"loss": step / 2})
    metrics.close()


def test_rows_are_json_lines_and_are_there_at_once(tmp_path):
    metrics = MetricsFile.open(tmp_path / "m.jsonl", step=0)
    metrics.write(1, {"loss": 0.5, "gone": math.nan, "huge": math.inf})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "loss": 0.5, "gone": null, "huge": null}\n'
    metrics.close()
    with pytest.raises(ConfigError, match="closed"):
        metrics.write(2, {})


def test_going_on_drops_what_came_after_the_restored_step(tmp_path):
    path = tmp_path / "m.jsonl"
    write_rows(path, 1, 2, 3, 4)
    metrics = MetricsFile.open(path, step=2)
    metrics.write(3, {"loss": 9.0})
    metrics.close()
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(1, 0.5), (2, 1.0), (3, 9.0)]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3}', "\x00\x00", '{"loss": 1}\n', "3\n"])
def test_a_torn_last_line_is_left_out(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    write_rows(path, 1, 2)
    path.write_text(path.read_text() + torn)
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    write_rows(path, 3)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_a_spoilt_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nspoilt\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"m\.jsonl:2: not a JSON object"):
        read_rows(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(path)


def test_a_file_that_needs_no_change_is_not_rewritten(tmp_path):
    path = tmp_path / "m.jsonl"
    write_rows(path, 1, 2)
    before = path.stat().st_ino
    MetricsFile.open(path, step=2).close()
    assert path.stat().st_ino == before
    MetricsFile.open(path, step=1).close()
    assert path.stat().st_ino != before


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_atomically(path, "old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be written: No space left on device.*untouched"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_row_that_does_not_fit_on_the_disk_is_an_error():
    metrics = MetricsFile(Path("/dev/full"), [], open("/dev/full", "a"))  # noqa: SIM115 - MetricsFile closes it
    with pytest.raises(ConfigError, match="/dev/full: cannot be written: No space left"):
        metrics.write(1, {"loss": 1.0})
    assert metrics.rows == []
    with pytest.raises(ConfigError, match="/dev/full"):
        metrics.close()


def test_the_folder_is_held_by_one_process_at_a_time(tmp_path):
    code = f"""
from pathlib import Path
from jdist.errors import ConfigError
from jdist.experiment.record import open_folder
try:
    with open_folder(Path({str(tmp_path / "run")!r})): print("free")
except ConfigError as exc: print(exc)
"""

    def other():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    with open_folder(tmp_path / "run"):
        assert "another process is writing this run" in other()
    assert other() == "free\n"


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(ConfigError, match=r"not a run folder: it holds thesis\.tex"), open_folder(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), open_folder(tmp_path / "file" / "run"):
        pass


def test_an_old_run_is_set_aside_under_the_first_free_name(tmp_path):
    assert set_aside(tmp_path / "run") is None
    for expected in ("run.1", "run.2"):
        with open_folder(tmp_path / "run"):
            pass
        assert set_aside(tmp_path / "run") == tmp_path / expected
    assert sorted(os.listdir(tmp_path)) == ["run.1", "run.2"]


def test_curves_are_a_picture_of_every_metric(tmp_path):
    rows = [{"step": n, "examples": n, "loss": 1 / n, "time_s": 0.1} for n in range(1, 9)]
    rows[3] |= {"eval/loss": 0.4, "eval/accuracy": 0.5}
    rows[5]["loss"] = None
    assert plot_curves(rows, tmp_path / "c.png", title="toy") == f"curves: {tmp_path / 'c.png'}"
    two_panels = (tmp_path / "c.png").read_bytes()
    assert two_panels.startswith(b"\x89PNG")
    plot_curves([{k: v for k, v in row.items() if k != "eval/accuracy"} for row in rows], tmp_path / "d.png", title="")
    height = [int.from_bytes((tmp_path / name).read_bytes()[20:24]) for name in ("c.png", "d.png")]
    assert height[0] == 2 * height[1]
    assert "nothing was measured" in plot_curves([], tmp_path / "e.png", title="")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = plot_curves([{"step": 1, "loss": 1.0}], tmp_path / "c.png", title="")
    assert text.endswith("matplotlib is not installed: pip install matplotlib")
    assert not (tmp_path / "c.png").exists()


def test_config_rows_stay_plain_json(tmp_path):
    write_rows(tmp_path / "m.jsonl", 1)
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": 0.5}
