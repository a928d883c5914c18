"""Whether less or more of a metric is better, by its name."""

from __future__ import annotations

from typing import Literal

Mode = Literal["min", "max"]

_LESS = ("loss", "error", "perplexity", "bits", "nats")
_MORE = ("acc", "auc", "f1", "precision", "recall", "top", "score")


def better(metric: str) -> Mode | None:
    """What the name of a metric says; None if it says nothing.

    Args:
        metric: its name, such as "loss" or "eval/accuracy".

    Example:
        >>> better("eval/loss"), better("accuracy"), better("close")
        ('min', 'max', None)
    """
    name = metric.rpartition("/")[2].lower()
    less, more = any(each in name for each in _LESS), any(each in name for each in _MORE)
    return None if less == more else "min" if less else "max"
