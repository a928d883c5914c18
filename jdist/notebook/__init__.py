"""A function of a notebook in several processes.

names     the source of a function, and the names that it uses
program   that source, and that of all it uses, as a script
values    arguments, constants and results in a file: plain data and arrays
child     what the script calls in each process
launch    `jdist.notebook_launch`: writes the script, launches it, and reads the result

May import: cluster, launcher and what is below them.
"""
