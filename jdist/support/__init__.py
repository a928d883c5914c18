"""Helpers for every room, which know nothing of jdist's concepts.

`arrays` puts arrays on devices and reads them back, `checks` validates arguments, `suggest` finds the nearest name, `file_lock`
locks files, `leaves` describes a tree's leaves and where they are, `table` writes text and HTML, `svg` draws pictures, `units`
writes numbers with their units, `tracebacks` hides jdist's frames from users, `chips` has the makers' figures of accelerators.

May import: errors.
"""
