"""Small things that everything uses and that know nothing of jdist.

May import: errors.
"""
