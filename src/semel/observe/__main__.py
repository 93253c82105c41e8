"""`python -m semel.observe`: the rules, on stdout."""

import sys

from semel.observe import rules

if __name__ == "__main__":
    sys.stdout.write(rules())
