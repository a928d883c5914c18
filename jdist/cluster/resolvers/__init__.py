"""Each platform's way to say which processes a job has: environment -> `ClusterSpec`."""
