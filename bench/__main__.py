"""The command `python -m bench`, which runs `bench.main`."""

import sys

from bench import main

sys.exit(main(sys.argv[1:]))
