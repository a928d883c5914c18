"""Many processes as one job: finding the cluster, starting it, watching it."""
