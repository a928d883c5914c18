"""JAX's coordinator over TLS: which settings and certificates are good."""

import datetime

import pytest
import trustme

from jdist.cli.doctor.network import AUTHORITY, CERTIFICATE, KEY, tls


def written(folder, authority, name="worker.job", **options):
    issued = authority.issue_cert(name, **options)
    folder.mkdir(exist_ok=True)
    (folder / "cert").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (folder / "key").write_bytes(issued.private_key_pem.bytes())
    (folder / "ca").write_bytes(authority.cert_pem.bytes())
    return {CERTIFICATE: str(folder / "cert"), KEY: str(folder / "key"), AUTHORITY: str(folder / "ca")}


def test_without_settings_it_warns():
    assert tls({}, "0.12.0").status == "warn"


def test_good_certificates_pass(tmp_path):
    found = tls(written(tmp_path, trustme.CA()), "0.12.0.1")
    assert (found.status, "not encrypted" in found.text) == ("pass", True)


def test_some_of_the_settings_fail():
    found = tls({CERTIFICATE: "x", AUTHORITY: " "}, "0.12.0")
    assert (found.status, found.text) == ("fail", f"{KEY} and {AUTHORITY} not set, as the others are")


def test_a_jax_without_it_fails(tmp_path):
    found = tls(written(tmp_path, trustme.CA()), "0.10.2")
    assert (found.status, "JAX 0.10.2 does not read" in found.text) == ("fail", True)


@pytest.mark.parametrize("wrong", ["no file", "another key", "another authority", "expired"])
def test_certificates_that_do_not_serve_fail(tmp_path, wrong):
    authority = trustme.CA()
    expired = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    options = {"not_after": expired} if wrong == "expired" else {}
    environ = written(tmp_path / "own", authority, **options)
    other = written(tmp_path / "other", trustme.CA())
    if wrong == "no file":
        environ[KEY] = str(tmp_path / "nothing")
    if wrong == "another key":
        environ[KEY] = other[KEY]
    if wrong == "another authority":
        environ[AUTHORITY] = other[AUTHORITY]
    found = tls(environ, "0.12.0")
    assert (found.status, "a handshake with" in found.text) == ("fail", True), found
