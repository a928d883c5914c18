"""`python -m jdist` is the command `jdist`."""

from __future__ import annotations

import sys

from jdist.cli import main

sys.exit(main())
