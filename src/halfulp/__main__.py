"""``python -m halfulp``: the command line, for launchers that take a module."""

from halfulp.cli import main

main()
