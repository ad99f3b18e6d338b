"""Every guide, followed command by command: ``tox -e guides``."""
