"""The subcommands of `jdist`: one function a file, which imports what it needs when it is called."""
