"""``python -m dynamo.vllm``: ``dynaplan worker --engine vllm``."""

from dynaplan.cli.compat import run_original

if __name__ == "__main__":
    run_original("dynamo.vllm")
