"""python -m jaxgpt is the command jaxgpt."""

import sys

from jaxgpt.cli import main

sys.exit(main())
