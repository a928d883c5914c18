"""`python -m jdist`: the command `jdist`."""

import sys

from jdist.cli import main

sys.exit(main())
