"""The exit codes by which a process of a job tells the launcher, or a cluster's scheduler, how it ended."""

from __future__ import annotations

FINISHED = 0
FAILED = 1  # training failed: a NaN, replicas that differ, an exception
USAGE = 2  # what was asked for is not right; trying again leads to the same
PEER_LOST = 75  # EX_TEMPFAIL of sysexits.h: another process was lost, failed or did not come; nothing was saved since
INTERRUPTED = 130  # 128 + SIGINT: saved and left
PREEMPTED = 143  # 128 + SIGTERM: saved and left
