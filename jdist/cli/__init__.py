"""The command line: one function a subcommand, which imports what it needs when it is called.

Start at `main`.

May import: everything.
"""
