"""`jdist doctor`: checks this machine and its cluster for what would keep a job from running.

Start at `report`, which calls the checks in the other files.

May import: everything below it; `together` stands for a user's program.
"""
