"""The command line: a function for each subcommand, whose imports wait until it is called.

Start at `main`.

May import: everything.
"""
