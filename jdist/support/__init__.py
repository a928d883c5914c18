"""Helpers for every room, which know nothing of jdist's concepts.

`arrays` puts arrays on devices and reads them back, `checks` validates arguments, `words` finds the nearest name and writes
numbers with their units, `file_lock` locks files, `leaves` describes a tree's leaves and where they are, `table` writes text
and HTML, `svg` draws pictures, `tracebacks` hides jdist's frames from users, `chips` has the makers' figures of accelerators.

May import: errors.
"""
