"""A function of a notebook in several processes.

launch   `jdist.notebook_launch`: pickles the function, launches processes that call it, and reads the result
pickled  functions, classes and values of a notebook for other processes, and what is returned, by cloudpickle

May import: cluster, launcher and what is below them.
"""
