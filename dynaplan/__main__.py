"""``python -m dynaplan``: the same as the command ``dynaplan``."""

from dynaplan.cli import main

if __name__ == "__main__":
    main()
