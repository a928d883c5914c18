"""How a run shows that it moves in a notebook: one output, whose bar moves."""

import io
import math

import IPython.display
import nbformat
import pytest
from nbclient import NotebookClient
from rich.console import Console

from jdist.loop.report import progress
from jdist.loop.report.progress import Lines, NotebookBar, Speed, open_report

SPEED = Speed(examples_per_s=12345.4, steps_per_s=96.4, eta_s=80)


class Shown:
    """What a notebook shows: each output with all that it has been."""

    def __init__(self):
        self.outputs = []

    def display(self, output, *, raw, display_id):
        assert (raw, display_id) == (True, True)
        self.outputs.append([output])
        return self

    def update(self, output, *, raw):
        assert raw
        self.outputs[-1].append(output)


@pytest.fixture
def shown(monkeypatch):
    found = Shown()
    monkeypatch.setattr(IPython.display, "display", found.display)
    return found


def test_one_output_moves(shown, monkeypatch):
    monkeypatch.setattr(progress, "_REDRAW_S", 0.0)
    report = open_report(Console(force_jupyter=True), step=0, total=600)
    report.move(1)
    report.train(100, {"loss": 0.31239}, SPEED)
    report.note("step 100/600  evaluation: <b> 0.5")
    report.close()
    (seen,) = shown.outputs
    assert [output["text/plain"] for output in seen] == [
        "step   0/600  compiling the first step",
        "step   1/600",
        line := "step 100/600  loss 0.3124  12,345 examples/s  ETA 0:01:20",
        *[f"{line}\nstep 100/600  evaluation: <b> 0.5"] * 2,
    ]
    assert '<progress value="100" max="600"></progress>' in seen[-1]["text/html"]
    assert "evaluation: &lt;b&gt; 0.5" in seen[-1]["text/html"]


def test_it_is_drawn_a_few_times_a_second_and_at_the_end(shown):
    report = NotebookBar(step=0, total=None)
    for step in range(1000):
        report.train(step, {"loss": math.pi}, SPEED)
    report.close()
    (seen,) = shown.outputs
    assert len(seen) < 100
    assert seen[-1]["text/plain"].startswith("step 999  loss 3.142")
    assert "<progress" not in seen[-1]["text/html"]  # without a total there is nothing to fill


def test_of_many_notes_the_newest_are_shown(shown):
    report = NotebookBar(step=0, total=9)
    for epoch in range(25):
        report.note(f"epoch {epoch}")
    lines = shown.outputs[0][-1]["text/plain"].splitlines()
    assert lines[1:] == ["(15 earlier)", *(f"epoch {epoch}" for epoch in range(15, 25))]


def test_a_file_gets_lines_in_a_notebook_too(shown):
    assert isinstance(open_report(Console(file=io.StringIO(), force_jupyter=True), step=0, total=1), Lines)
    assert not shown.outputs


FIT = """
import numpy as np
import jdist

def train_step(w, batch):
    loss, grad = jdist.value_and_grad(lambda w: jdist.mean((w * batch["x"] - 2.0) ** 2, batch["mask"]))(w)
    return w - 0.01 * grad, {"loss": loss}

def eval_step(w, batch):
    return {"error": jdist.mean(abs(w * batch["x"] - 2.0), batch["mask"])}

rows = {"x": np.ones(64, np.float32)}
jdist.fit(train_step, 0.0, rows, epochs=30, global_batch=16, eval_data=rows, eval_step=eval_step, log_every=1, log_to=None)[0]
"""


@pytest.mark.xdist_group("kernel")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own, in this process
def test_a_training_cell_has_one_output_beside_its_result(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FIT)])
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    bar, result = notebook.cells[0].outputs
    assert (bar.output_type, result.output_type) == ("display_data", "execute_result")
    assert bar.data["text/plain"].startswith("step 120/120  loss 0.")
    *_, evaluation, last = bar.data["text/plain"].splitlines()
    assert evaluation.startswith("step 120/120  evaluation: error 0.")
    assert last.startswith("time: ")
    assert '<progress value="120" max="120">' in bar.data["text/html"]
