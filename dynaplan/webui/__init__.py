"""The web page of a deployment, below ``/ui`` of its frontends.

The page shows what commands print, and does what commands do: docs/guides/web-page.md has the reasons. A
process of its own polls the deployment while the page is open (``sse_clients``), and each action is a command
(``actions``). This package lets the right people in (``page_guard``), passes on what that process writes, and
draws nothing itself but the charts that it is asked for (``charts``).
"""
