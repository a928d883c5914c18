"""`task` of a config -> the task it names."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from jdist.errors import ConfigError
from jdist.experiment.config import TaskSection
from jdist.experiment.names import nearest
from jdist.experiment.options import check_options
from jdist.experiment.parse import Key
from jdist.experiment.validate import Problem, show
from jdist.loop.task import Task
from jdist.tasks.options import OptionError

_MAKE: Key = ("task", "make")
_OPTIONS: Key = ("task", "options")


def load_task(section: TaskSection, problems: list[Problem]) -> Task | None:
    """Import and call `task.make`.

    Args:
        section: `task` of the config.
        problems: what is wrong is appended here, with the key that is to blame.

    Returns:
        The task; None if something is wrong.
    """
    try:
        function = _import(section.make)
        found = list(check_options(function, section.options, called=section.make, key=_OPTIONS))
        problems += found
        if found:
            return None
        task = function(**section.options)
    except OptionError as exc:
        key, *others = ((*_OPTIONS, *option.split(".")) for option in (exc.option, *exc.others))
        problems.append(Problem(key=key, text=exc.text, remedy=exc.remedy, others=tuple(others)))
    except ConfigError as exc:
        problems.append(Problem(key=_MAKE, text=str(exc)))
    except ModuleNotFoundError as exc:
        problems.append(Problem(key=_MAKE, text=_not_found(section.make.partition(":")[0], exc.name or str(exc))))
    else:
        if isinstance(task, Task):
            return task
        returned = f"{section.make} returned {show(type(task).__name__)}, not a jdist.tasks.Task"
        problems.append(Problem(key=_MAKE, text=returned))
    return None


def _import(make: str) -> Any:
    """The function of an import path `module:function`; the current folder can be imported from."""
    module_name, _, function_name = make.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = importlib.import_module(module_name)
    function = vars(module).get(function_name)
    if not callable(function):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"{module_name} has no function {function_name!r}.{nearest(function_name, functions, label='Its functions')}"
        )
    return function


def _not_found(wanted: str, missing: str) -> str:
    if wanted == missing or wanted.startswith(f"{missing}."):
        return f"no module {missing!r}; it must be installed, or lie in the current folder {os.getcwd()}"
    install = "'jdist[examples]'" if missing.partition(".")[0] in ("sklearn", "matplotlib") else missing
    return f"{wanted} needs the module {missing!r}, which is not installed: pip install {install}"
