import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist.launcher.output import LONGEST_LINE, PROGRESS_EVERY_S, Lines


def feed(*pieces, every_s=0.0):
    """All that is logged and shown of pieces that come `every_s` apart."""
    lines, logged, shown = Lines(), b"", b""
    for n, piece in enumerate(pieces):
        more = lines.feed(piece, n * every_s)
        logged, shown = logged + more[0], shown + more[1]
    more = lines.close()
    return logged + more[0], shown + more[1]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"one\ntwo\n"], b"one\ntwo\n"),
        ([b"o", b"n", b"e\nt", b"wo"], b"one\ntwo\n"),
        ([b"one\r", b"\ntwo\r\n"], b"one\ntwo\n"),
        ([b"\n\n"], b"\n\n"),
        ([b""], b""),
        ([b"\r10%\r20%\r100%\ndone\n"], b"100%\ndone\n"),
        ([b"\r10%", b"\r20%", b"\r30%", b"\n"], b"10%\n30%\n"),
        ([b"\xff\xfe\n"], b"\xff\xfe\n"),
        ([b"a long one, erased\r      \r\n"], b"a long one, erased\n"),
    ],
)
def test_what_is_shown(pieces, shown):
    assert feed(*pieces) == (b"".join(pieces), shown)


def test_of_progress_the_newest_is_shown_every_few_seconds():
    pieces = [b"\r%d%%" % n for n in range(101)]
    assert feed(*pieces, every_s=0.1)[1].splitlines() == [b"0%", b"50%", b"100%"]
    assert PROGRESS_EVERY_S == 5.0


def test_a_line_is_kept_until_it_is_whole():
    lines = Lines()
    assert lines.feed(b"half", 0.0) == (b"", b"")
    assert lines.feed(b" a line\nnext", 0.0) == (b"half a line\n", b"half a line\n")


def test_a_line_without_end_does_not_fill_the_memory():
    lines = Lines()
    data = b"x" * (LONGEST_LINE + 1)
    assert lines.feed(data, 0.0) == (data, data + b"\n")
    assert lines.close() == (b"", b"")


@given(st.lists(st.text("a\r\n", max_size=6).map(str.encode), max_size=8), st.sampled_from([0.0, 10.0]))
def test_the_log_holds_all_and_what_is_shown_are_lines(pieces, every_s):
    logged, shown = feed(*pieces, every_s=every_s)
    assert logged == b"".join(pieces)
    assert b"\r" not in shown
    assert shown.endswith(b"\n") or not shown
    assert shown.count(b"\n") >= logged.count(b"\n")
