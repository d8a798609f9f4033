"""`python -m lossless_lab.cli`, where the command is not on the path."""

import sys

from lossless_lab.cli import main

sys.exit(main())
