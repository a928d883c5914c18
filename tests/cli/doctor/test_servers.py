"""`jdist doctor` in a parameter server's cluster."""

import datetime
import json
import socket
import types

import pytest
import trustme

from jdist.cli.doctor import servers as doctor_servers
from jdist.cli.doctor.report import examine
from jdist.cli.doctor.servers import servers
from jdist.cluster import ClusterSpec
from jdist.ps.transport import diagnose
from jdist.support.versions import versions
from tests.ps.servers import configs, serving, written

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A worker and a ps with TLS and a token: the jobs, and the environment of a process that they let in."""
    environ = {"JDIST_TOKEN": "t", **written(tmp_path_factory.mktemp("certified"), trustme.CA())}
    jobs, config = configs(1, 1)
    with serving(*(([], environ | {"TF_CONFIG": config[task, 0]}) for task in ("ps", "worker"))):
        yield jobs, environ


def look(jobs, environ, *, alone=False, timeout_s=10):
    spec = ClusterSpec(jobs={k: tuple(v) for k, v in jobs.items()}, task_type="chief", task_index=0)
    return [(f.status, f.check, f.text) for f in servers(spec, environ, alone=alone, timeout_s=timeout_s)]


def test_a_cluster_that_is_right(cluster):
    jobs, environ = cluster
    worker, ps = f"worker 0 ({jobs['worker'][0]})", f"ps 0 ({jobs['ps'][0]})"
    assert look(jobs, environ) == [
        ("pass", "security", "TLS and a token"),
        ("pass", "tls", f"{environ['JDIST_TLS_CERT']} is good for both sides of a connection"),
        ("pass", "servers", f"{ps} answers"),
        ("pass", "servers", f"{worker} answers"),
        ("pass", "servers", f"{worker} reaches 1 ps"),
    ]


def test_another_token_or_authority_or_no_tls_is_explained(cluster, tmp_path):
    jobs, environ = cluster
    stranger = {**environ, **written(tmp_path / "stranger", trustme.CA())}
    for wrong, said in (
        ({**environ, "JDIST_TOKEN": "x"}, "it refuses this process's token. JDIST_TOKEN is another there"),
        (stranger, "its certificate is not accepted here"),
        ({"JDIST_TOKEN": "t"}, "it speaks TLS, and this process has no certificate"),
    ):
        found = [line for line in look(jobs, wrong) if line[1] == "servers"]
        assert [status for status, _, _ in found] == ["fail", "fail"]
        assert all(said in text for _, _, text in found), found


def test_versions_that_do_not_fit_are_named_with_both_hosts(cluster, monkeypatch):
    jobs, environ = cluster
    ours = versions()
    monkeypatch.setattr(diagnose, "versions", lambda: {**ours, "jax": "0.99.0", "writes": 99, "host": "chief"})
    found = [line for line in look(jobs, environ) if line[1] == "servers"]
    assert [status for status, _, _ in found] == ["fail", "fail"]
    for _, _, text in found:
        assert f": it has other versions: jax is {ours['jax']} on {ours['host']} and 0.99.0 on chief; " in text
        assert "and chief writes 99. Install the same on all hosts" in text


def test_a_server_that_is_not_there(cluster):
    jobs, environ = cluster
    found = look({**jobs, "ps": [*jobs["ps"], "127.0.0.1:1"]}, environ, timeout_s=1)
    assert ("fail", "servers", "ps 1 (127.0.0.1:1): nothing answers there (Connection refused)") in found
    assert found[-1] == ("pass", "servers", f"worker 0 ({jobs['worker'][0]}) reaches 1 ps")


def test_a_silent_stranger_at_a_port():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        found = look({"chief": ["127.0.0.1:1"], "ps": [address]}, {"JDIST_TOKEN": "t"}, timeout_s=1)
    status, _, text = found[-1]
    assert status == "fail"
    assert text.startswith(f"ps 0 ({address}): it accepts connections, but does not answer (")
    assert "another program has the port" in text


def test_a_server_that_is_still_starting_is_waited_for(cluster, monkeypatch, capsys):
    jobs, environ = cluster
    asked, now = [], iter(range(0, 1000, 6))

    def reach_all(addresses, security, timeout_s):
        asked.append(list(addresses))
        return [
            doctor_servers.Diagnosis("nothing answers there", lasts=False)
            if address in jobs["ps"] and len(asked) < 3
            else None
            for address in addresses
        ]

    monkeypatch.setattr(doctor_servers, "reach_all", reach_all)
    monkeypatch.setattr(
        doctor_servers, "time", types.SimpleNamespace(monotonic=lambda: next(now), sleep=lambda seconds: None)
    )
    assert "fail" not in [status for status, *_ in look(jobs, environ, timeout_s=60)]
    assert asked == [[*jobs["ps"], *jobs["worker"]], jobs["ps"], jobs["ps"]]
    said = capsys.readouterr().err
    assert said == f"jdist doctor: waiting up to 60 s for ps 0 ({jobs['ps'][0]})\n"


def test_what_a_worker_cannot_reach(cluster, monkeypatch):
    jobs, environ = cluster
    trouble = doctor_servers.Diagnosis("nothing answers there", lasts=False)
    monkeypatch.setattr(doctor_servers, "seen_from", lambda *_: [trouble])
    worker, ps = f"worker 0 ({jobs['worker'][0]})", f"ps 0 ({jobs['ps'][0]})"
    assert look(jobs, environ)[-1] == ("fail", "servers", f"{worker} to {ps}: nothing answers there")


def test_alone_it_looks_at_the_settings(tmp_path):
    jobs, _ = configs(1, 1)
    assert look(jobs, {}, alone=True) == [("pass", "security", "the servers are on this machine alone")]
    ((status, _, text),) = look(jobs | {"ps": ["ps0:2222"]}, {"JDIST_TOKEN": "t"}, alone=True)
    assert (status, "Without TLS" in text) == ("warn", True)
    ((status, _, text),) = look(jobs, {"JDIST_TLS_CERT": "/nowhere"}, alone=True)
    assert (status, text.startswith("JDIST_TLS_CERT is '/nowhere'")) == ("fail", True)
    expired = written(tmp_path, trustme.CA(), not_after=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    assert look(jobs, expired, alone=True)[-1][:2] == ("warn", "tls")


def test_the_command_looks_at_servers_and_joins_nobody(cluster, monkeypatch):
    jobs, environ = cluster
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}}))
    found = [*examine(alone=False, timeout_s=20)]
    assert found[-1].text == f"worker 0 ({jobs['worker'][0]}) reaches 1 ps"
    assert {"cluster", "names", "servers"} <= {each.check for each in found}
    assert not {"together", "ports"} & {each.check for each in found}
