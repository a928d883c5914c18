"""`python -m jdist`: the command `jdist`."""

import sys

from jdist.cli.main import main

sys.exit(main())
