"""Trackers: a run that is killed and goes on is one run in each, with every step once; a tracker that fails ends no run."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import types
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jdist import callbacks
from jdist.callbacks import Started, TrackerWarning
from jdist.callbacks.trackers import _Files, last_steps
from jdist.checkpoint.bucket import BucketPath, open_path
from jdist.errors import CheckpointError, ConfigError, StepError
from jdist.loop.report.curves import matrix_as_png
from tests.callbacks import tracked_program
from tests.children import without_devices
from tests.loop import loop_programs
from tests.loop.loop_programs import EVAL

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "lines": "jdist",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
    "mlflow": "mlflow",
}
STEPS = {"loss": range(1, 13), "epoch/loss": (4, 8, 12)}
PICTURES = [("eval/confusion", 4), ("eval/confusion", 8), ("eval/confusion", 12), ("curves", 12)]


def is_there(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name]) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run left what it wrote, that was killed two steps after its second checkpoint, and went on."""
    folder = tmp_path_factory.mktemp("tracked")
    names = [name for name in PACKAGES if is_there(name)]
    environment = without_devices() | {
        "PYTHONPATH": str(ROOT),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_SILENT": "true",
    }
    for kill_at, code in ((10, -signal.SIGKILL), (0, 0)):
        done = subprocess.run(
            [sys.executable, tracked_program.__file__, str(folder), str(kill_at), *names],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "TrackerWarning" not in done.stderr
    return folder


def check(points: dict[str, list[tuple[int, float]]], folder: Path) -> None:
    """Compares a tracker's points with the run's own rows, which are those of a run that was never killed."""
    rows = [json.loads(line) for line in (folder / "checkpoints" / "history.jsonl").read_text().splitlines()]
    for name, steps in STEPS.items():
        assert [step for step, _ in points[name]] == list(steps), name
        values = [row[name] for row in rows if name in row]
        np.testing.assert_allclose([value for _, value in points[name]], values, rtol=1e-6)  # TensorBoard has float32


class TestOneRun:
    def test_one_that_a_user_wrote(self, folder: Path):
        lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
        run_id = lines[0][1]
        assert [line for line in lines if line[0] != "log"] == [
            ["start", run_id, False, tracked_program.CONFIG],
            ["start", run_id, True, tracked_program.CONFIG],
            ["finish", "finished"],
        ]
        rows = [line[1:] for line in lines if line[0] == "log"]
        check({name: [(step, row[name]) for step, row, _ in rows if name in row] for name in STEPS}, folder)
        assert [(name, step) for step, _, images in rows for name in images] == PICTURES
        assert {kind for *_, images in rows for kind in images.values()} == {"PNG"}

    def test_tensorboard(self, folder: Path):
        pytest.importorskip("tensorboardX", reason="pip install 'jdist[tensorboard]'")
        from tensorboardX.proto.event_pb2 import Event

        points: dict[str, list[tuple[int, float]]] = {}
        pictures, tags = [], set()
        for path in sorted((folder / "tensorboard").iterdir()):
            for event in map(Event.FromString, records(path.read_bytes())):
                for value in event.summary.value:
                    tags.add(value.tag)
                    if value.WhichOneof("value") == "simple_value":
                        points.setdefault(value.tag, []).append((event.step, value.simple_value))
                    elif value.WhichOneof("value") == "image":
                        assert value.image.encoded_image_string[1:4] == b"PNG"
                        assert (value.image.width, value.image.height) > (99, 99)
                        pictures.append((value.tag, event.step))
        check(points, folder)
        assert pictures == PICTURES
        assert {"config/text_summary", "_hparams_/experiment"} <= tags

    def test_trackio(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        pytest.importorskip("trackio", reason="pip install 'jdist[trackio]'")
        program = (
            "import json, trackio; from trackio.sqlite_storage import SQLiteStorage as s\n"
            "(run,) = trackio.Api().runs('p')\n"
            "print(json.dumps([run.config, s.get_logs('p', run.name, run_id=run.id)], default=str))"
        )
        environment = os.environ | {"TRACKIO_DIR": str(folder / "trackio")}
        read = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert read.returncode == 0, read.stderr
        config, rows = json.loads(read.stdout)
        assert {name: config[name] for name in tracked_program.CONFIG} == tracked_program.CONFIG
        check({name: [(row["step"], row[name]) for row in rows if name in row] for name in STEPS}, folder)
        pictures = [(name, row["step"]) for row in rows for name in ("eval/confusion", "curves") if name in row]
        assert pictures == PICTURES

    def test_weights_and_biases(self, folder: Path):
        pytest.importorskip("wandb", reason="pip install 'jdist[wandb]'; `make trackers` has it")
        from wandb.proto.wandb_internal_pb2 import Record

        points: dict[str, list[tuple[int, float]]] = {}
        pictures, configs, ids = [], [], set()
        for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
            for record in map(Record.FromString, leveldb_records(path.read_bytes())):
                if record.HasField("run"):
                    ids.add(record.run.run_id)
                    configs.append({item.key: item.value_json for item in record.run.config.update})
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    value = json.loads(item.value_json)
                    if value == "image-file":
                        pictures.append((name.removesuffix("/_type"), record.history.step.num))
                    elif name in STEPS:
                        points.setdefault(name, []).append((record.history.step.num, value))
        assert len(ids) == 1
        assert json.loads(configs[0]["train"]) == tracked_program.CONFIG["train"]
        check(points, folder)
        assert [step for _, step in pictures] == [step for _, step in PICTURES]
        assert sorted(pictures) == sorted(PICTURES)  # of one step W&B writes them in any order

    @pytest.mark.filterwarnings("ignore::DeprecationWarning:sqlalchemy", "ignore::DeprecationWarning:mlflow")
    def test_mlflow(self, folder: Path):
        mlflow = pytest.importorskip("mlflow", reason="pip install 'jdist[mlflow]'; `make trackers` has it")
        client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
        assert (run.info.status, run.info.run_name) == ("FINISHED", "cloud")
        assert run.data.params == {"train.steps": "12", "train.learning_rate": "0.5", "name": "cloud"}
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        check({name: [(each.step, each.value) for each in points] for name, points in histories.items()}, folder)
        images = [file.path for file in client.list_artifacts(run.info.run_id, "images")]
        assert len([path for path in images if path.endswith(".png")]) == len(PICTURES)

    def test_a_file_store_of_mlflow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        mlflow = pytest.importorskip("mlflow", reason="pip install 'jdist[mlflow]'; `make trackers` has it")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 keeps it for those who ask for it
        uri = (tmp_path / "mlruns").as_uri()
        for epochs in (1, 2):
            tracker = callbacks.mlflow(tracking_uri=uri, experiment="e", config={"a": {"b": 1}})
            fit(callbacks.checkpoint(tmp_path / "saved"), tracker, epochs=epochs, log_every=1)
        client = mlflow.MlflowClient(tracking_uri=uri)
        (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
        assert run.data.params == {"a.b": "1"}
        assert [each.step for each in client.get_metric_history(run.info.run_id, "loss")] == list(range(1, 15))

    def test_a_run_of_tensorboard_that_was_killed_within_its_config_has_it_whole(self, tmp_path: Path):
        service = pytest.importorskip("tensorboardX", reason="pip install 'jdist[tensorboard]'")
        config = {"a": {"b": 1}}

        def begin(folder: Path, *, resumed: bool) -> set[str]:
            writer = _Files(service, folder)
            writer.start("0", config, resumed=resumed)
            writer.finish("finished")
            return set(last_steps(folder))

        whole = begin(tmp_path / "whole", resumed=False)
        (path,) = (tmp_path / "whole").iterdir()
        content = path.read_bytes()
        ends = np.cumsum([16 + len(record) for record in records(content)])
        for end in ends:
            folder = tmp_path / f"to{end}"
            folder.mkdir()
            (folder / f"{path.name}.killed").write_bytes(content[:end])
            assert begin(folder, resumed=True) == whole

    def test_a_run_of_mlflow_that_was_killed_before_its_params_gets_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        mlflow = pytest.importorskip("mlflow", reason="pip install 'jdist[mlflow]'; `make trackers` has it")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (tmp_path / "mlruns").as_uri()
        client = mlflow.MlflowClient(tracking_uri=uri)
        run_id = client.create_run("0", tags={"jdist.run_id": "12345678"}).info.run_id
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved/tracker-mlflow.json").write_text('{"run_id": "12345678", "steps": {}}')
        tracker = callbacks.mlflow(tracking_uri=uri, config={"a": {"b": 1}})
        fit(callbacks.checkpoint(tmp_path / "saved"), tracker, epochs=1)
        assert client.get_run(run_id).data.params == {"a.b": "1"}


def records(content: bytes) -> Iterator[bytes]:
    """The records of a file of TFRecord's format."""
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield content[12 : 12 + length]
        content = content[16 + length :]


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB's format, in blocks of 32 KiB, behind W&B's header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        part = content[at + 7 : at + 7 + length]
        at += 7 + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            yield parts


class Fake:
    """A tracker of this process; `fails` names the method that raises, or waits for `release`."""

    def __init__(self, fails: str = "", *, error: BaseException | None = None, release: threading.Event | None = None):
        self.calls: list[Any] = []
        self._fails, self._error, self._release = fails, error, release

    def _call(self, method: str, *values: Any) -> None:
        if self._fails == method and self._release is not None:
            self._release.wait(60)
        if self._fails == method and self._error is not None:
            raise self._error
        self.calls.append((method, *values))

    def start(self, run_id: str, config: Any, *, resumed: bool) -> Started:
        self._call("start", run_id, config, resumed)
        return Started()

    def log(self, step: int, scalars: Any, images: Any) -> None:
        self._call("log", step, dict(scalars), dict(images))

    def finish(self, status: str) -> None:
        self._call("finish", status)


fit = functools.partial(loop_programs.fit, epochs=2, verify="off")


class TestFailures:
    @pytest.mark.parametrize("method", ["start", "log", "finish"])
    def test_a_tracker_that_fails_is_named_once_and_training_goes_on(self, method):
        tracker = Fake(method, error=ConnectionError("no route to tracker.example"))
        plain, _ = fit(log_every=1)
        with pytest.warns(TrackerWarning) as warned:
            state, history = fit(callbacks.track(tracker, name="mine"), log_every=1)
        jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
        assert len(history.rows) == 14
        texts = [str(each.message) for each in warned]
        first = {
            "start": "cannot be reached",
            "log": "did not take the row of step 1",
            "finish": "could not end its run",
        }
        assert texts[0].startswith(f"mine: {first[method]}")
        assert "ConnectionError: no route to tracker.example" in texts[0]
        assert texts[1:] == (["mine: 14 of 14 rows were lost on the way to it."] if method == "log" else [])

    def test_a_library_that_wants_to_exit_ends_its_thread_alone(self):
        with pytest.warns(TrackerWarning, match="mine: its thread has ended: SystemExit: 1") as warned:
            _, history = fit(callbacks.track(Fake("start", error=SystemExit(1)), name="mine"), log_every=1)
        assert (len(history.rows), len(warned)) == (14, 1)

    def test_the_next_run_of_the_process_is_told_again(self):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")  # as in a notebook, whose cell is run again
            for _ in range(2):
                fit(callbacks.track(Fake("start", error=ConnectionError("no route")), name="mine"), epochs=1)
        assert [each.category for each in warned] == [TrackerWarning] * 2

    def test_a_row_that_is_refused_is_lost_alone(self):
        class Once(Fake):
            def log(self, step: int, scalars: Any, images: Any) -> None:
                if step == 3:
                    raise OSError("503")
                super().log(step, scalars, images)

        tracker = Once()
        with pytest.warns(TrackerWarning, match=r"did not take the row of step 3: OSError: 503\. Training goes on"):
            fit(callbacks.track(tracker, name="mine"), log_every=1, epochs=1)
        assert [call[1] for call in tracker.calls if call[0] == "log"] == [1, 2, 4, 5, 6, 7, 7]
        assert tracker.calls[-1] == ("finish", "finished")

    @pytest.mark.parametrize("method", ["start", "log", "finish"])
    def test_one_that_hangs_keeps_the_run_only_until_its_deadline(self, method):
        release = threading.Event()
        tracker = Fake(method, release=release)
        began = time.monotonic()
        with pytest.warns(TrackerWarning, match=r"mine: not done 0\.5 s after the end of the run; (\d+ of 2|all) rows"):
            fit(callbacks.track(tracker, name="mine", timeout_s=0.5), log_every=7)
        assert time.monotonic() - began < 50
        release.set()

    @pytest.mark.parametrize("comes_back", [True, False])
    def test_rows_that_find_no_room_are_counted(self, monkeypatch, comes_back):
        """Of a tracker that stands still a while, and of one that still does at the end."""
        monkeypatch.setattr("jdist.callbacks.delivery._MOST_WAITING", 5)
        release = threading.Event()
        tracker = Fake("start", release=release)
        timeout_s = 60.0 if comes_back else 0.5
        goes_on = callbacks.Callback(on_end=lambda _: release.set() if comes_back else None, logs=())
        with pytest.warns(TrackerWarning) as warned:
            fit(callbacks.track(tracker, name="mine", timeout_s=timeout_s), goes_on, log_every=1)
        first, last = (str(each.message) for each in warned)
        release.set()
        assert first.startswith("mine: it is 5 rows behind; further rows are dropped, from step 6 on.")
        if comes_back:
            assert last == "mine: 9 of 14 rows were lost on the way to it."
            assert [call[1] for call in tracker.calls if call[0] == "log"][:5] == [1, 2, 3, 4, 5]
            assert tracker.calls[-1] == ("finish", "finished")
        else:
            assert last.startswith("mine: not done 0.5 s after the end of the run; 14 of 14 rows may be missing.")
            threads = [each for each in threading.enumerate() if each.name == "tracker mine"]
            for thread in threads:
                thread.join(10)
            assert not any(thread.is_alive() for thread in threads)

    def test_a_full_disk_is_named(self, tmp_path, monkeypatch):
        def full(path: Path, content: Any) -> None:
            raise ConfigError(f"{path}: cannot be written: No space left on device.")

        monkeypatch.setattr("jdist.callbacks.delivery.write_atomically", full)
        saves = callbacks.checkpoint(tmp_path)
        with pytest.warns(TrackerWarning, match="No space left on device") as warned:
            fit(saves, callbacks.track(Fake(), name="mine"), log_every=1, epochs=1)
        assert len(warned) == 1

    def test_a_torn_file_of_the_id_begins_a_new_run(self, tmp_path):
        tmp_path.joinpath("tracker-mine.json").write_text('{"run_id": "7"')
        tracker = Fake()
        with pytest.warns(TrackerWarning, match=r"tracker-mine\.json cannot be read .*; a new run begins"):
            fit(callbacks.checkpoint(tmp_path), callbacks.track(tracker, name="mine"), epochs=1)
        assert tracker.calls[0][-1] is False


class TestRows:
    def test_vectors_are_numbers_matrices_are_pictures_and_the_rest_is_named(self):
        tracker = Fake()
        extra = {"per_class": np.array([0.5, 1.0]), "confusion": np.eye(2), "all": np.zeros((2, 2, 2))}

        def add(moment: callbacks.Moment) -> None:
            assert moment.row is not None
            moment.row.update(extra)

        told = callbacks.Callback(on_eval=add), callbacks.track(tracker, name="mine")
        with pytest.warns(TrackerWarning, match=r"all is not shown, it is an array of shape \(2, 2, 2\)"):
            fit(*told, log_every=100, epochs=1, **EVAL)
        _, step, scalars, images = tracker.calls[1]
        assert (step, scalars["per_class/0"], scalars["per_class/1"], list(images)) == (7, 0.5, 1.0, ["confusion"])
        assert images["confusion"] == matrix_as_png(np.eye(2), title="confusion, step 7")
        assert tracker.calls[2][3].keys() == {"curves"}

    def test_what_a_kill_took_on_its_way_is_given_again(self, tmp_path):
        """Also NaN in an array, and to a tracker that can say what it holds."""

        def add(moment: callbacks.Moment) -> None:
            assert moment.row is not None
            moment.row["per_class"] = np.array([0.5, np.nan])

        class Loses(Fake):
            def start(self, run_id: str, config: Any, *, resumed: bool) -> Started:
                return Started(logged={"loss": 5} if resumed else None)

        first, second = Loses(), Loses()
        for tracker, epochs in ((first, 1), (second, 2)):
            told = callbacks.Callback(on_eval=add), callbacks.track(tracker, name="mine")
            fit(callbacks.checkpoint(tmp_path), *told, epochs=epochs, log_every=1, **EVAL)
        logged = [(call[1], call[2]) for call in second.calls if call[0] == "log"]
        assert [step for step, scalars in logged if "loss" in scalars] == list(range(6, 15))
        assert [step for step, scalars in logged if "per_class/1" in scalars] == [7, 14]
        assert [step for step, scalars in logged if "time_s" in scalars] == list(range(1, 15))

    def test_a_run_that_is_kept_in_a_bucket_goes_on_in_its_run(self):
        url = f"memory://bucket/{uuid.uuid4()}"
        first, second = Fake(), Fake()
        for tracker, epochs in ((first, 1), (second, 2)):
            fit(callbacks.checkpoint(url), callbacks.track(tracker, name="mine"), epochs=epochs, log_every=1)
        assert first.calls[0][-1] is False
        assert second.calls[0] == ("start", first.calls[0][1], {}, True)
        steps = [[call[1] for call in each.calls if call[0] == "log" and "loss" in call[2]] for each in (first, second)]
        assert steps == [list(range(1, 8)), list(range(8, 15))]
        told = [callbacks.track(Fake(), name="mine") for _ in range(2)]
        with pytest.raises(ConfigError, match=r"overwrite each other in memory:///bucket/.*/tracker-mine\.json"):
            fit(callbacks.checkpoint(url), *told, epochs=3)

    def test_into_a_bucket_the_marks_are_written_now_and_then_and_none_is_left_out(self, monkeypatch):
        written: list[dict[str, int]] = []
        write = BucketPath.write_text

        def spied(path: BucketPath, text: str, **options: Any) -> None:
            write(path, text, **options)
            if path.name == "tracker-mine.json":
                written.append(json.loads(text)["steps"])

        def wait(moment: callbacks.Moment) -> None:
            deadline = time.monotonic() + 60
            while moment.step == 6 and written[-1].get("loss") != 5:  # by then no row comes any more
                assert time.monotonic() < deadline, written
                time.sleep(0.01)

        monkeypatch.setattr(BucketPath, "write_text", spied)
        saves, told = callbacks.checkpoint(f"memory://bucket/{uuid.uuid4()}"), callbacks.track(Fake(), name="mine")
        fit(saves, told, callbacks.Callback(on_step=wait), log_every=1)
        assert len(written) < 10  # before and after the start; 14 rows are in fewer
        assert written[-1]["loss"] == 14

    def test_a_fenced_job_leaves_the_marks_of_its_successor(self):
        place = open_path(f"memory://bucket/{uuid.uuid4()}", 60)
        tracker = Fake()

        def take_over(moment: callbacks.Moment) -> None:
            deadline = time.monotonic() + 60
            while moment.step == 8 and not any(
                call[0] == "log" for call in tracker.calls
            ):  # for 2 s nothing is written
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if moment.step == 8:
                (place / ".job").write_text(json.dumps({"token": "another", "who": "process 7 on host-b"}))
                (place / "tracker-mine.json").write_text("of the successor")

        saves, told = callbacks.checkpoint(str(place), every=None), callbacks.track(tracker, name="mine")
        with (
            pytest.warns(
                TrackerWarning, match="mine: its position cannot be saved.*process 7 on host-b has since begun"
            ),
            pytest.raises(CheckpointError, match="process 7 on host-b has since begun to save here"),
        ):
            fit(saves, told, callbacks.Callback(on_step=take_over), log_every=1)
        assert (place / "tracker-mine.json").read_text() == "of the successor"

    def test_a_run_that_begins_anew_is_another_one(self, tmp_path):
        trackers = [Fake(), Fake()]
        for tracker in trackers:
            saves = callbacks.checkpoint(tmp_path / "x", resume=False)
            fit(saves, callbacks.track(tracker, name="mine"), log_every=7)
        assert [tracker.calls[0][-1] for tracker in trackers] == [False, False]
        assert trackers[0].calls[0][1] != trackers[1].calls[0][1]
        assert len(trackers[0].calls) == len(trackers[1].calls)

    def test_two_of_one_name_are_refused(self, tmp_path):
        told = [callbacks.track(Fake(), name="mine") for _ in range(2)]
        with pytest.raises(ConfigError, match="mine: two trackers of this run have this name"):
            fit(callbacks.checkpoint(tmp_path / "x"), *told)
        fit(callbacks.checkpoint(tmp_path / "y"), told[0], callbacks.track(Fake(), name="other"))

    def test_a_run_that_has_ended_asks_nothing_of_it(self, tmp_path):
        fit(callbacks.checkpoint(tmp_path), epochs=1)
        tracker = Fake()
        fit(callbacks.checkpoint(tmp_path), callbacks.track(tracker, name="mine"), epochs=1)
        assert tracker.calls == []

    @pytest.mark.parametrize("error", [None, ValueError("boom")])
    def test_how_it_ended_is_told(self, error):
        tracker = Fake()

        def end(moment: callbacks.Moment) -> None:
            if error is not None:
                raise error
            if moment.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        tracked = callbacks.track(tracker, name="mine")
        if error is not None:
            with pytest.raises(ValueError, match="boom"):
                fit(tracked, end)
        else:
            fit(tracked, end)
        assert tracker.calls[-1] == ("finish", "interrupted" if error is None else "failed")

    def test_only_the_chief_tracks(self):
        tracker = Fake()
        tracked = callbacks.track(tracker, name="mine")
        chief = types.SimpleNamespace(is_chief=False, total_steps=None, step=0)
        assert tracked.on_start is not None
        assert tracked.on_row is not None
        assert tracked.close is not None
        tracked.on_start(chief)
        tracked.on_row(types.SimpleNamespace(is_chief=False, row={"step": 1, "loss": 1.0}))
        tracked.close()
        assert tracker.calls == []


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"tracker": object()}, "has no method `start`"),
            ({"name": "a/b"}, "`name` is 'a/b'; it must be of letters"),
            ({"timeout_s": 0}, "`timeout_s` is 0; it must be a number of seconds above 0"),
            ({"config": [1]}, r"`config` is \[1\]; it must be a dict"),
        ],
    )
    def test_of_track(self, arguments, text):
        with pytest.raises(StepError, match=text):
            callbacks.track(**{"tracker": Fake(), "name": "mine"} | arguments)

    @pytest.mark.parametrize(
        ("name", "options", "text"),
        [
            ("trackio", {"nam": "x"}, r"trackio: no option 'nam'\. Did you mean name\?"),
            ("trackio", {"resume": "must"}, r"jdist sets 'resume' itself\. Options: name, group"),
            ("wandb", {"projct": "x"}, r"wandb: no option 'projct'\. Did you mean project\?"),
            ("wandb", {"mode": "ofline"}, r"`mode` is 'ofline'; it must be one of 'online', 'offline'"),
            ("mlflow", {"tracking_uri": "nowhere://x"}, "mlflow: `tracking_uri` is 'nowhere://x'"),
        ],
    )
    def test_of_each_tracker(self, name, options, text):
        pytest.importorskip(name, reason=f"pip install 'jdist[{name}]'; `make trackers` has all")
        with pytest.raises(ConfigError, match=text):
            getattr(callbacks, name)(**options)

    @pytest.mark.parametrize("name", ["wandb", "tensorboardX", "mlflow", "trackio"])
    def test_what_is_not_installed_is_named(self, name, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, name, None)
        folder = {"folder": tmp_path} if name == "tensorboardX" else {}
        with pytest.raises(ConfigError, match=r"pip install 'jdist\["):
            getattr(callbacks, name.lower().removesuffix("x"))(**folder)
