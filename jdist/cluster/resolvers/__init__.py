"""Each platform's way to say which processes a job has: environment -> `ClusterSpec`.

Start at `resolve.resolve`, which asks one after the other. `ranks` serves the launchers that give each process
a rank, `unplaced` refuses what shows several processes and no place.

May import: the files of `jdist.cluster` that it describes: spec, address, environment.
"""
