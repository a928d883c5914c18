"""Unpacks an artifact with the damages of some seeds, in little memory; prints how many were refused and accepted."""

import pathlib
import random
import resource
import sys

import jax
import jax.numpy as jnp

from jdist.errors import ArtifactError
from jdist.ps.program.artifact import pack, unpack

ROOM_BYTES = 1 << 30  # besides what the process has mapped at the start
LENGTHS = (0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0x10000)


def artifact():
    jax.config.update(
        "jax_traceback_in_locations_limit", 0
    )  # the bytes hold no path, and a seed does the same everywhere
    return pack(lambda v: [jnp.tanh(v[0]) @ v[1], v[1] * 2], [jnp.ones((4, 3)), jnp.ones(3)])


def damaged(artifact, rng):
    """With flipped bits, an end that is missing, another length or offset, or another byte."""
    damaged = bytearray(artifact)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.choice([1, 1, 2, 8])):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        case 1:
            del damaged[rng.randrange(len(damaged)) :]
        case 2:
            at = rng.randrange(len(damaged) - 4)
            damaged[at : at + 4] = rng.choice(LENGTHS).to_bytes(4, "little")
        case _:
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 255, 127, 128])
    return bytes(damaged)


def main(*seeds):
    whole, counts = artifact(), [0, 0]
    unpack(whole)
    mapped = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM_BYTES, resource.RLIM_INFINITY))
    for seed in seeds:
        try:
            unpack(damaged(whole, random.Random(seed)))
            counts[1] += 1
        except ArtifactError:
            counts[0] += 1
    print(*counts)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
