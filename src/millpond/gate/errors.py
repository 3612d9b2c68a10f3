"""Why something could not be tested; importing this loads no torch."""


class CannotTest(Exception):
    """This path cannot be tested here; the message says why, and what would help."""


class NoGpu(CannotTest):
    """There is no GPU that torch can use."""


class TooLittleMemory(CannotTest):
    """The GPU has too little free memory for the test."""


class NoPackage(CannotTest):
    """A package that the path is made of is not installed."""


class UnknownVersion(CannotTest):
    """A package is of a version whose interface is not known."""
