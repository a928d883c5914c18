"""Small things that everything uses and that know nothing of jdist.

`arrays` puts arrays on devices and reads them back, `suggest` finds near names, `checks` whole numbers; `tracebacks` hides
jdist's own frames from a user's.

May import: errors.
"""
