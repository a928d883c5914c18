"""A wall clock that a test sets while a program runs."""

import subprocess

# The wall clock of a program is set while a file exists.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long set_by(void) { return access(getenv("SET_FILE"), F_OK) ? 0 : atol(getenv("SET_BY_S")); }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, t);
    if (!code && id == CLOCK_REALTIME) t->tv_sec += set_by();
    return code;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return code;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""


def settable_clock(folder, set_by_s):
    """Builds the library; returns the environment variables of the program, and the file that sets its clock."""
    source, library, is_set = folder / "shim.c", folder / "shim.so", folder / "set"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SET_FILE": str(is_set), "SET_BY_S": str(set_by_s)}, is_set
