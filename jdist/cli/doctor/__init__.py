"""`jdist doctor`: checks this machine and its cluster for what would keep a job from running.

Start at `report`, which calls the checks of this machine, its network, and a parameter server's servers.

May import: everything below it; `report` stands for a user's program.
"""
