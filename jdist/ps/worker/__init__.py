"""The process that computes closures.

Start at `server`; `execute` pulls, computes and pushes; `data` reads a worker's own dataset.

May import: ps.transport and what is below it; no server.
"""
