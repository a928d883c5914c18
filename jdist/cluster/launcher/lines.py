"""Bytes as they come out of a process -> whole lines, to log as they were and to show as a terminal would."""

from __future__ import annotations

LONGEST_LINE = 64 * 1024  # more without an end of line is passed on in pieces
PROGRESS_EVERY_S = 5.0


class Lines:
    """One stream of one process.

    What ends with a lone carriage return is progress, overwritten on a terminal: of it the newest is shown every
    few seconds, while the log holds all.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> tuple[bytes, bytes]:
        """Take what came.

        Args:
            data: bytes of any length.
            now: seconds of a rising clock.

        Returns:
            What is whole now, as it came, and what of it to show: lines that each end with a newline.
        """
        whole = self._rest + data
        # A carriage return at the very end may be the first half of an end of line.
        end = max(whole.rfind(b"\n"), whole.rfind(b"\r", 0, len(whole) - 1)) + 1
        self._rest = whole[end:]
        whole = whole[:end]
        shown = self._show(whole, now)
        if len(self._rest) > LONGEST_LINE:
            whole, shown = whole + self._rest, shown + self._rest.rstrip(b"\r") + b"\n"
            self._rest = b""
        return whole, shown

    def close(self) -> tuple[bytes, bytes]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        shown = _overwritten(rest)
        return rest, shown + b"\n" if shown else b""

    def _show(self, whole: bytes, now: float) -> bytes:
        if b"\r" not in whole:
            return whole
        lines, newline, progress = whole.replace(b"\r\n", b"\n").rpartition(b"\n")
        shown = b"".join(_overwritten(line) + b"\n" for line in lines.split(b"\n")) if newline else b""
        newest = _overwritten(progress)
        if newest and now - self._shown_at >= PROGRESS_EVERY_S:
            self._shown_at = now
            shown += newest + b"\n"
        return shown


def _overwritten(line: bytes) -> bytes:
    """What of a line stays to be seen, each part having overwritten the one before."""
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
