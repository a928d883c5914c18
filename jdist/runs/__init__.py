"""Run folders: listed, compared, repeated, and made by the dozen. It stands on `jdist.experiment`, which makes one."""
