"""Tasks that `jdist run` knows by name; a user's own task is a file like these."""

from jdist.fit.task import Task as Task
