"""`python -m bench`."""

import sys

from bench.attention import main

sys.exit(main(sys.argv[1:]))
