"""A function of a notebook in several processes.

source    the source of a function, the names that it uses, and values that differ from it
program   that source, and that of all it uses, as a script
values    arguments, constants and results in a file: plain data and arrays
child     the functions that the script calls in each process
launch    `jdist.notebook_launch`: writes the script, launches it, and reads the result

May import: cluster, launcher and what is below them.
"""
