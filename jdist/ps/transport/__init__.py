"""How bytes get to another process: one small seam, an in-process fake, and gRPC."""
