"""The command `jdist`: calls the subcommand, and turns its errors into a line and an exit code."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import select
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from jdist.cli.configs import checkpoint, plan, run, runs, sweep
from jdist.cli.processes import doctor, launch, serve
from jdist.cluster import exit_status
from jdist.errors import ConfigError, JDistError
from jdist.strategies import absent_plugins
from jdist.support.words import did_you_mean

COMMANDS: dict[str, Callable[..., int]] = {
    "run": run,
    "sweep": sweep,
    "runs": runs,
    "checkpoint": checkpoint,
    "plan": plan,
    "launch": launch,
    "serve": serve,
    "doctor": doctor,
}
_FORMAT_WARNING = warnings.formatwarning
_FLAGS_ANYWHERE = ("run", "sweep", "runs", "plan")  # the arguments of `launch` belong to another program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, or the arguments after `jdist`; returns the exit code."""
    warnings.formatwarning = _format_warning
    try:
        try:
            code = _call(sys.argv[1:] if arguments is None else list(arguments))
        except SystemExit:  # of --help
            print(end="", flush=True)
            raise
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is not flushed there again
        exit_status.failed(exit_status.FAILED)
        return exit_status.FAILED


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    """Formats a warning; its place only where that is the user's code, not the command line's."""
    if f"{os.sep}tyro{os.sep}" in filename:
        return f"jdist: warning: {message}\n"
    return _FORMAT_WARNING(message, category, filename, lineno, line)


def _is_reader_gone() -> bool:
    """Returns whether nobody reads standard output any longer, as in `jdist runs | head -1`."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors alone
    return bool(poll.poll(0))


def _call(arguments: Sequence[str]) -> int:
    """Calls the subcommand, and turns its errors into a line and an exit code."""
    try:
        code = _dispatch(arguments)
        if code != exit_status.FINISHED:
            exit_status.unfinished(f"exit code {code}")
        return code
    except JDistError as exc:
        if os.environ.get("JDIST_TRACEBACK"):
            raise
        # The notes say where: the data and its batch, or the checkpoint.
        print(f"jdist: {exc}", *getattr(exc, "__notes__", ()), sep="\n", file=sys.stderr)
        code = exit_status.of(exc)
    except KeyboardInterrupt:
        print("jdist: interrupted", file=sys.stderr)
        code = exit_status.INTERRUPTED
    exit_status.failed(code)
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    """Calls a known subcommand, refuses an unknown one, and lists all where none is given."""
    if arguments and arguments[0] in COMMANDS:
        name, *rest = arguments
        _refuse_dashes(name, rest)
        if name != "plan":  # which may be asked for GPUs' kernels
            absent_plugins.pass_over_plugin()
        if name in _FLAGS_ANYWHERE:
            rest = flags_last(rest, COMMANDS[name])
        return tyro.cli(COMMANDS[name], prog=f"jdist {name}", args=rest)
    if arguments and arguments[0] in ("--version", "-V"):
        print(f"jdist {importlib.metadata.version('jdist')}")
        return exit_status.FINISHED
    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(
            f"unknown command {arguments[0]!r}.{did_you_mean(arguments[0], COMMANDS)} Commands: {', '.join(COMMANDS)}."
        )
    app = tyro.extras.SubcommandApp()  # by itself it would show the whole help of every subcommand
    for name, command in COMMANDS.items():
        app.command(name=name, help=(command.__doc__ or "").partition("\n")[0])(command)
    return app.cli(prog="jdist", description="Distribute a JAX train step.", args=arguments)


def _refuse_dashes(command: str, arguments: Sequence[str]) -> None:
    """Raises a `ConfigError` for overrides with dashes, and for the number of processes by the name that MPI has for it."""
    for argument, value in zip(arguments, [*arguments[1:], "N"], strict=False):
        if argument == "--":
            return
        if command in _FLAGS_ANYWHERE and argument.startswith("--") and "." in argument.partition("=")[0]:
            key, _, given = argument.removeprefix("--").partition("=")
            raise ConfigError(f"{argument}: an override has no dashes: `{key}={given or value}`.")
        if command == "launch" and argument in ("-np", "-n"):
            raise ConfigError(f"{argument}: jdist launch takes the number of processes as `--processes {value}`.")
        if command == "launch" and not argument.startswith("-"):
            return


def flags_last(arguments: Sequence[str], command: Callable[..., int]) -> list[str]:
    """Sorts arguments for argparse: first the positional ones, then the flags with their values."""
    keywords = [p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY]
    # A bool flag in the signature of `command` has no value; any other has one.
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
