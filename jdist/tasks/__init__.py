"""Tasks that come with jdist; a user's own task is a file like these.

Start at `digits`. They import what users import, `jdist` itself.

May import: everything that is public.
"""

from jdist.loop.task import Task as Task
