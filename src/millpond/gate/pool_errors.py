"""Errors of the full-pool check; importing them loads no torch."""

from millpond.model.errors import SetupError


class PoolInUse(SetupError):
    """The pool is not empty, or somebody else has joined it; nothing of it was touched."""


class NotRegistered(SetupError):
    """The arena could not be registered with the GPU; copies would be slow and block the host."""


class PoolFault(Exception):
    """The check found something wrong; the message says what, and where it shows first."""
