"""`python -m shoal` is the command `shoal`."""

from shoal.cli.processes import main

if __name__ == "__main__":
    main()
