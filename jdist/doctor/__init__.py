"""`jdist doctor`: checks this machine and its cluster for all that would keep a job from running.

Start at `report`, which calls the checks of each of the other files.

May import: everything below it; `together` stands for a user's program.
"""
