"""The command line: a function for each subcommand, which imports what it needs when it is called.

Start at `main`.

May import: everything.
"""
