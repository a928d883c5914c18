"""The environment of libtpu on a machine without a TPU, and with one."""

from jdist.strategies import libtpu


def test_a_compiler_takes_no_lock_and_asks_no_server(tmp_path):
    wanted = libtpu.compiler_environment({}, dev=tmp_path)
    assert wanted["ALLOW_MULTIPLE_LIBTPU_LOAD"] == wanted["TPU_SKIP_MDS_QUERY"] == "1"
    assert "TPU_SKIP_MDS_QUERY" not in libtpu.compiler_environment({"TPU_SKIP_MDS_QUERY": "0"}, dev=tmp_path)


def test_a_machine_with_a_tpu_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(libtpu, "is_installed", lambda: True)
    assert set(libtpu.quiet_environment({}, dev=tmp_path)) == {
        "TPU_SKIP_MDS_QUERY",
        "TPU_ACCELERATOR_TYPE",
        "TPU_WORKER_HOSTNAMES",
    }
    (tmp_path / "accel0").touch()
    assert libtpu.quiet_environment({}, dev=tmp_path) == {}
    assert set(libtpu.compiler_environment({}, dev=tmp_path)) == {"ALLOW_MULTIPLE_LIBTPU_LOAD"}


def test_without_libtpu_there_is_nothing_to_quieten(tmp_path, monkeypatch):
    monkeypatch.setattr(libtpu, "is_installed", lambda: False)
    assert libtpu.quiet_environment({}, dev=tmp_path) == {}
