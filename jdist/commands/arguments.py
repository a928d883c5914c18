"""Arguments that several subcommands take, as the command line reads and shows them."""

from typing import Annotated

import tyro

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
ConfigFile = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="")]
Overrides = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")
]
