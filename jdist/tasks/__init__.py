"""Tasks that `jdist run` knows by name; a user's own task is a file like these."""

from jdist.tasks.task import Task as Task
