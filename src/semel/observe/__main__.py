"""`python -m semel.observe`: the rules, on stdout."""

import sys

from semel.observe import rules

sys.stdout.write(rules())
