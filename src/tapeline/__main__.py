"""`python -m tapeline`: the command line, also where the script isn't on the path."""

from tapeline.cli import main

main()
