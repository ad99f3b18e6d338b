"""The pictures of the documents, from one real run: ``tox -e pictures``."""
