"""The command line: ``millpond``. The only place that reads the environment.

Answers go to stdout, progress and errors to stderr; ``cli/exits.py`` has the exit codes.
"""

from millpond.cli.app import main, run

__all__ = ["main", "run"]
