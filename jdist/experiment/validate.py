"""Plain values -> a checked `Config`, or one error that lists every problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from jdist.errors import ConfigError
from jdist.experiment.config import Config
from jdist.experiment.load import Document
from jdist.loop.report.metrics_file import NAMES, better
from jdist.support.signature import Key, Problem, dotted, problem_of, show
from jdist.support.words import closest


def validate(document: Document) -> Config:
    """Checks the values of a document against the schema, and fills in defaults."""
    problems = list(_length(document.values))
    config = None
    try:
        config = Config.model_validate(document.values)
    except ValidationError as exc:
        problems += [_translate(error) for error in exc.errors(include_url=False)]
    if config is not None:
        config, more = _with_mode(config)
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


def _with_mode(config: Config) -> tuple[Config, list[Problem]]:
    """Completes `checkpoint.mode`; returns the config, and what is wrong with `checkpoint.best`."""
    best, mode = config.checkpoint.best, config.checkpoint.mode
    if best is None or mode is not None:
        return config, []
    mode = better(best)
    if mode is None:
        near = closest(best.rpartition("/")[2].lower(), NAMES, cutoff=0.75)
        remedy = f"Did you mean eval/{near}? Else set checkpoint.mode=max" if near else "Set checkpoint.mode=max"
        text = f"cannot tell from the name {show(best)} whether higher is better"
        return config, [Problem(key=("checkpoint", "best"), text=text, remedy=f" {remedy} or min.")]
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"mode": mode})}), []


def _translate(error: Any) -> Problem:
    """Phrases one of pydantic's errors in jdist's words, with the schema's knowledge of the key."""
    problem = problem_of(error)
    key, about = problem.key, dict(_keys()).get(problem.key, "")
    if error["type"] == "extra_forbidden":
        return Problem(key=key, text="no such key", remedy=_nearest_key(key))
    if error["type"] == "missing":
        return Problem(key=key, text="missing", remedy=f" {about}" if about else "")
    return replace(problem, remedy=f" {about}") if error["type"] == "string_pattern_mismatch" else problem


def _keys(model: type[BaseModel] = Config, prefix: Key = ()) -> Iterator[tuple[Key, str]]:
    """Lists every key of the schema with its description."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), field.description or ""
        # A section may be null.
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _keys(part, (*prefix, name))


def _nearest_key(key: Key) -> str:
    """Names the valid key nearest to a wrong one: at its level first, then anywhere by its last part."""
    known = [k for k, _ in _keys()]
    siblings = [k for k in known if k[:-1] == key[:-1]]
    by_name = {k[-1]: k for k in reversed(known)}
    for candidates, cutoff in (({k[-1]: k for k in siblings}, 0.6), (by_name, 0.8)):
        close = closest(key[-1], candidates, cutoff=cutoff)
        if close is not None:
            return f" Did you mean {dotted(candidates[close])}?"
    where = dotted(key[:-1]) or "the top level"
    return f" Keys of {where}: {', '.join(k[-1] for k in siblings)}."
