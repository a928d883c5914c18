"""The local launcher: several processes of one machine as one job."""
