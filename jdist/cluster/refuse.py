"""One form for every refusal of a cluster's description."""

from __future__ import annotations

import reprlib

from jdist.errors import ClusterConfigError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def refused(variable: str, value: object, allowed: str, mend: str, *, field: str | None = None) -> ClusterConfigError:
    """The error that says what is wrong, which value it is, what is allowed and how to mend it.

    Args:
        variable: the environment variable or argument that holds the value.
        value: what was found; None if nothing was.
        allowed: what it must be, as the end of a sentence.
        mend: what to do, a sentence.
        field: the part of the variable that holds the value; None if it is the variable itself.

    Returns:
        The error, to be raised.

    Example:
        >>> str(refused("SLURM_PROCID", "x", "a whole number", "Set it by srun."))
        "SLURM_PROCID is 'x'; it must be a whole number. Set it by srun."
    """
    where = variable if field is None else f"{variable}: `{field}`"
    found = "is not set" if value is None else f"is {_SHORT.repr(value)}"
    return ClusterConfigError(
        f"{where} {found}; it must be {allowed}. {mend}",
        variable=variable,
        field=variable if field is None else field,
        value=value,
    )
