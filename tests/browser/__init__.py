"""The web page in a real browser, headless Chromium: ``tox -e browser``."""
