"""``python -m millpond.cli``: the same as the ``millpond`` script."""

from millpond.cli.app import main

main()
