"""The command `jdist`: finds the subcommand, and turns what it raises into a line and an exit code."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from jdist.cli.doctor import doctor
from jdist.cli.launch import launch
from jdist.cli.plan import plan
from jdist.cli.run import run
from jdist.cli.runs import runs
from jdist.cli.serve import serve
from jdist.cli.sweep import sweep
from jdist.cluster import exit_status
from jdist.errors import ConfigError, JDistError
from jdist.support.suggest import did_you_mean

COMMANDS: dict[str, Callable[..., int]] = {
    "run": run,
    "sweep": sweep,
    "runs": runs,
    "plan": plan,
    "launch": launch,
    "serve": serve,
    "doctor": doctor,
}
_FLAGS_ANYWHERE = ("run", "sweep", "runs", "plan")  # what follows `launch` belongs to another program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows `jdist`; those of the process if None.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _dispatch(arguments)
        if code != exit_status.FINISHED:
            exit_status.unfinished(f"exit code {code}")
        return code
    except JDistError as exc:
        if os.environ.get("JDIST_TRACEBACK"):
            raise
        print(f"jdist: {exc}", file=sys.stderr)
        code = exit_status.of(exc)
    except KeyboardInterrupt:
        print("jdist: interrupted", file=sys.stderr)
        code = exit_status.INTERRUPTED
    exit_status.failed(code)
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    """Hand a known subcommand its arguments; refuse an unknown one; list the subcommands without one."""
    if arguments and arguments[0] in COMMANDS:
        name, *rest = arguments
        if name in _FLAGS_ANYWHERE:
            rest = flags_last(rest, COMMANDS[name])
        return tyro.cli(COMMANDS[name], prog=f"jdist {name}", args=rest)
    if arguments and arguments[0] in ("--version", "-V"):
        print(f"jdist {importlib.metadata.version('jdist')}")
        return exit_status.FINISHED
    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(
            f"there is no command {arguments[0]!r}.{did_you_mean(arguments[0], COMMANDS)} Commands: {', '.join(COMMANDS)}."
        )
    app = tyro.extras.SubcommandApp()  # by itself it would show the whole help of every subcommand
    for name, command in COMMANDS.items():
        app.command(name=name, help=(command.__doc__ or "").partition("\n")[0])(command)
    return app.cli(prog="jdist", description="Distribute a JAX train step.", args=arguments)


def flags_last(arguments: Sequence[str], command: Callable[..., int]) -> list[str]:
    """Arguments in the order that argparse takes: it wants all that have no name in one piece.

    Args:
        arguments: of the command.
        command: by its signature, a flag that is true or false has no value, and any other one has.

    Returns:
        All without a name first, then the flags, each with its value.

    Example:
        >>> def plan(config, overrides, *, topology, json=False): ...
        >>> flags_last(["--json", "a.yaml", "--topology", "cpu:8", "train.steps=5"], plan)
        ['a.yaml', 'train.steps=5', '--json', '--topology', 'cpu:8']
    """
    keywords = [p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY]
    with_value = {f"--{p.name.replace('_', '-')}" for p in keywords if not isinstance(p.default, bool)}
    unnamed: list[str] = []
    flags: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            unnamed.append(argument)
            continue
        flags.append(argument)
        if argument in with_value:
            flags += [value for value in [next(rest, None)] if value is not None]
    return [*unnamed, *flags]
