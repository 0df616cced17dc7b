"""`python -m tarnn`: the command line, for `torchrun -m tarnn` and wherever the script is not on the path."""

import sys

from tarnn.cli.main import main

sys.exit(main())
