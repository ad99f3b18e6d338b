"""``python -m dynamo.frontend``: ``dynaplan frontend``."""

from dynaplan.cli.compat import run_original

if __name__ == "__main__":
    run_original("dynamo.frontend")
