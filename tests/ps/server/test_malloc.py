"""The C library's memory."""

import platform

from jdist.ps.server.malloc import keep_freed_memory


def test_the_c_library_is_told_where_it_listens():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
