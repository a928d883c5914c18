"""Helpers for every room, which know nothing of jdist's concepts.

`arrays` puts arrays on devices and reads them back, `suggest` finds the nearest name, `checks` validates numbers, `file_lock`
locks files, `html` and `leaf_table` show values in notebooks, `tracebacks` hides jdist's frames from users, `units` writes
numbers with their units, `chips` has the makers' figures of accelerators.

May import: errors.
"""
