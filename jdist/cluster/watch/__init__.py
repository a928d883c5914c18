"""The processes of a job watch each other: a line from each to process 0, and what is said over it."""
