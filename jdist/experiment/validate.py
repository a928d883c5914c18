"""Plain values -> a checked `Config`, or one error that lists every problem."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from jdist.errors import ConfigError
from jdist.experiment.config import Config
from jdist.experiment.load import Document, Key, dotted
from jdist.report.metric_direction import NAMES, better
from jdist.support.suggest import closest


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something wrong with one key."""

    key: Key
    text: str  # what is wrong, without the key
    remedy: str = ""  # how to mend it; opens with a space, or is empty
    others: tuple[Key, ...] = ()  # further keys that have to do with it, whose places are named too


def validate(document: Document) -> Config:
    """Checks the values of a document against the schema, and fills in defaults."""
    problems = list(_length(document.values))
    config = None
    try:
        config = Config.model_validate(document.values)
    except ValidationError as exc:
        problems += [_translate(error) for error in exc.errors(include_url=False)]
    if config is not None:
        config, more = _with_best(config)
        problems += more
    if config is not None and not problems and not document.problems:
        return config
    raise refusal(document, problems)


def refusal(document: Document, problems: Sequence[Problem]) -> ConfigError:
    """Makes the error that lists the document's own problems and `problems`, each with the origin of its key."""
    lines = [
        *document.problems,
        *(f"{dotted(p.key)}: {p.text.rstrip('.')} ({_places(document, p)}).{p.remedy}" for p in problems),
    ]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} problems with {document.file}:\n" + "\n".join(f"  {line}" for line in lines))


def _places(document: Document, problem: Problem) -> str:
    """Names the places of a problem's keys; for a key that was not given, that of the nearest above it."""
    origins = [document.origins[key] for key in (problem.key, *problem.others) if key in document.origins]
    return " and ".join(dict.fromkeys(origins)) or document.origin(problem.key)


def show(value: Any) -> str:
    """Writes a value as it would be in a config, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _length(values: dict[str, Any]) -> Iterator[Problem]:
    """Yields a problem unless just one of `train.steps` and `train.epochs` is given."""
    train = values.get("train")
    if isinstance(train, dict):
        steps, epochs = train.get("steps"), train.get("epochs")
        if steps is None and epochs is None:
            yield Problem(key=("train", "steps"), text="missing; say train.steps or train.epochs")
        elif steps is not None and epochs is not None:
            yield Problem(
                key=("train", "epochs"),
                text=f"both train.epochs={show(epochs)} and train.steps={show(steps)} are given",
                remedy=" Keep one; train.steps=null or train.epochs=null takes the other back.",
            )


def old_names(config: Config, document: Document) -> list[str]:
    """Notes the names that a document has from an earlier jdist, and what to write now."""
    best, written = config.checkpoint.best, best_as_written(document)
    if best == written:
        return []
    return [
        f"note: checkpoint.best: {written} is read as {best} ({document.origin(('checkpoint', 'best'))}), the name that "
        "rows have. Write that."
    ]


def best_as_written(document: Document) -> str | None:
    """Returns `checkpoint.best` as the document has it, with "eval/" or, as jdist once had it, without."""
    return (document.values.get("checkpoint") or {}).get("best")


def _with_best(config: Config) -> tuple[Config, list[Problem]]:
    """Completes `checkpoint.best` and `checkpoint.mode`; returns the config, and what is wrong with them."""
    checkpoint = config.checkpoint
    if checkpoint.best is None:
        return config, []
    best = checkpoint.best if checkpoint.best.startswith("eval/") else f"eval/{checkpoint.best}"
    mode = checkpoint.mode or better(best)
    if mode is None:
        text = f"cannot tell from the name {show(checkpoint.best)} whether higher is better"
        near = closest(checkpoint.best.rpartition("/")[2].lower(), NAMES, cutoff=0.75)
        remedy = (
            f" Did you mean eval/{near}? Else set checkpoint.mode=max or min."
            if near
            else " Set checkpoint.mode=max or min."
        )
        return config, [Problem(key=("checkpoint", "best"), text=text, remedy=remedy)]
    return config.model_copy(update={"checkpoint": checkpoint.model_copy(update={"best": best, "mode": mode})}), []


def _translate(error: Any) -> Problem:
    """Says one of pydantic's errors in jdist's words."""
    key = tuple(str(part) for part in error["loc"])
    kind, value, limits = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(key=key, text="no such key", remedy=_nearest_key(key))
    if kind == "missing":
        about = _description(key)
        return Problem(key=key, text="missing", remedy=f" {about}" if about else "")
    allowed = {
        "greater_than": "> {gt}",
        "greater_than_equal": ">= {ge}",
        "less_than": "< {lt}",
        "less_than_equal": "<= {le}",
        "int_type": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "string_type": "text",
        "bool_type": "true or false",
        "literal_error": "{expected}",
        "model_type": "a mapping of keys to values",
        "dict_type": "a mapping of keys to values",
        "list_type": "a list",
        "string_pattern_mismatch": "of the right form",
        "string_too_short": "at least {min_length} character long",
        "string_too_long": "at most {max_length} characters long",
    }.get(kind)
    text = f"{show(value)} is not {allowed.format(**limits)}" if allowed else f"{show(value)}: {error['msg']}"
    remedy = ""
    if kind == "literal_error" and isinstance(value, str):
        close = closest(value, [part.strip("' ") for part in limits["expected"].replace(" or ", ",").split(",")])
        remedy = f" Did you mean {close}?" if close else ""
    elif kind == "string_pattern_mismatch":
        remedy = f" {_description(key)}"
    elif kind == "string_type" and isinstance(value, bool | int | float):
        remedy = f" If it is meant as text, quote it: '{value}'."
        if isinstance(value, bool):  # written in one of YAML's ways
            remedy = f" If it is meant as text, quote it as it is written, such as '{'yes' if value else 'no'}'."
    return Problem(key=key, text=text, remedy=remedy)


def _keys(model: type[BaseModel] = Config, prefix: Key = ()) -> Iterator[tuple[Key, str]]:
    """Lists every key of the schema with its description."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), field.description or ""
        # A section may be null, or be an entry of a list.
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _keys(part, (*prefix, name))


def _description(key: Key) -> str:
    return dict(_keys()).get(_without_places(key), "")


def _without_places(key: Key) -> Key:
    """Drops the numbers of entries of lists from a key, as the schema has it."""
    return tuple(part for part in key if not part.isdecimal())


def _nearest_key(key: Key) -> str:
    """Names the valid key nearest to a wrong one: at its level first, then anywhere by its last part."""
    known = [k for k, _ in _keys()]
    siblings = [k for k in known if k[:-1] == _without_places(key)[:-1]]
    by_name = {k[-1]: k for k in reversed(known)}
    for candidates, cutoff in (({k[-1]: (*key[:-1], k[-1]) for k in siblings}, 0.6), (by_name, 0.8)):
        close = closest(key[-1], candidates, cutoff=cutoff)
        if close is not None:
            return f" Did you mean {dotted(candidates[close])}?"
    where = dotted(key[:-1]) or "the top level"
    return f" Keys of {where}: {', '.join(k[-1] for k in siblings)}."
