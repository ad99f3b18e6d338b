"""The ports: small protocols between the rooms that decide and the adapters that act.

Most ports have a real adapter and a twin in memory; both pass the same contract tests (``tests/contract``).
"""
