"""Token and certificates from the environment: what is taken, what is refused and how."""

import pytest
import trustme

from jdist.errors import ClusterConfigError
from jdist.ps.transport.security import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    Security,
    how_to_protect,
    open_to_others,
    read_security,
)
from tests.ps.servers import TLS, written


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return written(tmp_path_factory.mktemp("good"), trustme.CA())


def test_nothing_is_set():
    assert read_security({"JDIST_TOKEN": " ", CERTIFICATE: ""}) == Security()
    assert Security().lacks == ("token", "TLS")


def test_all_is_read_and_flags_count_before_variables(good):
    found = read_security({"JDIST_TOKEN": "t", "JDIST_TLS_NAME": "ps.job", **good})
    with open(good[KEY], "rb") as file:
        assert found.key == file.read()
    assert (found.token, found.name, found.lacks) == ("t", "ps.job", ())
    flags = {CERTIFICATE: good[CERTIFICATE], KEY: None, AUTHORITY: None}
    assert read_security({**good, CERTIFICATE: "/nowhere"}, flags) == read_security(good)


@pytest.mark.parametrize("missing", TLS)
def test_one_of_the_three_is_not_named(good, missing):
    with pytest.raises(
        ClusterConfigError, match=f"{missing} is not set; it must be set, as others of the three are. Set"
    ):
        read_security({k: v for k, v in good.items() if k != missing})


@pytest.mark.parametrize("variable", TLS)
def test_a_file_is_not_there(good, variable):
    with pytest.raises(ClusterConfigError, match=rf"{variable} is '/nowhere'; .*It cannot be read: No such file"):
        read_security({**good, variable: "/nowhere"})


def test_a_key_of_another_certificate(good, tmp_path):
    other = written(tmp_path / "other", trustme.CA())
    with pytest.raises(
        ClusterConfigError, match=rf"{KEY} is .* the certificate .*They do not go together: KEY_VALUES_MIS"
    ):
        read_security({**good, KEY: other[KEY]})


def test_what_is_no_certificate(good, tmp_path):
    (tmp_path / "text").write_text("no PEM")
    with pytest.raises(ClusterConfigError, match=rf"{AUTHORITY} is .*; it must be certificates in PEM"):
        read_security({**good, AUTHORITY: str(tmp_path / "text")})


def test_a_token_that_cannot_travel_is_not_shown():
    with pytest.raises(ClusterConfigError, match="JDIST_TOKEN is '4 characters'; it must be of printable ASCII"):
        read_security({"JDIST_TOKEN": "caf\N{LATIN SMALL LETTER E WITH ACUTE}"})


def test_who_is_open_to_whom(good):
    own, far = ["127.0.0.1:1", "localhost:2", "[::1]:3"], ["0.0.0.0:4", "ps0:5"]
    token, both = Security(token="t"), read_security({**good, "JDIST_TOKEN": "t"})
    assert open_to_others(own, Security()) is None
    assert open_to_others([*own, *far], both) is None
    text = open_to_others([*own, *far], token)
    assert text is not None
    assert (text.startswith("0.0.0.0:4 and 1 more can be reached"), "Without a token" in text) == (True, False)
    assert "Without a token whoever reaches a server" in str(open_to_others(far, Security()))
    assert how_to_protect(token).startswith(f"Set {CERTIFICATE}, {KEY}, {AUTHORITY} on all processes")
