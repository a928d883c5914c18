"""Programs and tasks to read and to change; docs/examples.md. Run them from this folder's parent."""
