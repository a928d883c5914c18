"""One file a strategy: a pure function that returns a `Strategy`."""
