"""`python -m semel` is `semel`."""

from semel.cli import main

main()
