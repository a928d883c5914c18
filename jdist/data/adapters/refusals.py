"""Refusals that several adapters share."""

from jdist.errors import DatasetError


def refuse_rows(kind: str, global_batch: int | None) -> None:
    """Raises a `DatasetError` for a `global_batch` of a dataset that has batches of its own."""
    if global_batch is not None:
        raise DatasetError(
            f"`global_batch` is {global_batch}, but `data` is a {kind}, which has batches of its own. Leave `global_batch` "
            "out, or the dataset's own batching."
        )
