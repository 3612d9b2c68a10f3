"""The one table of exit codes, and the one place where errors become codes.

0    done, or stopped as asked
1    the answer is no: a check failed, outputs differ, a request that must hit did not
2    wrong usage: an unknown command, option, configuration key or value
3    something has to be set up or changed first; the message says what
4    the other side is away: no daemon, no answer in time, a process that ended
5    the pool contradicts itself: a bug in Millpond
6    a pool that must be empty is in use; nothing of it was touched
7    not everything that was asked for was checked; nothing that was is wrong
8    the same, for want of a GPU
9    the same, for want of free GPU memory
10   the same, for want of a package
11   the same, because a package's version is not known
70   an unexpected error: a bug in Millpond
130  interrupted by Ctrl-C
143  ended by SIGTERM
"""

import enum

import httpx

from millpond.gate.errors import CannotTest, NoGpu, NoPackage, TooLittleMemory, UnknownVersion
from millpond.gate.pool_errors import PoolInUse
from millpond.model.errors import ConfigError, ExpectedError, InvariantBroken, SetupError


class Exit(enum.IntEnum):
    """See the module."""

    OK = 0
    NO = 1
    USAGE = 2
    SETUP = 3
    AWAY = 4
    BROKEN = 5
    IN_USE = 6
    NOT_CHECKED = 7
    NO_GPU = 8
    GPU_MEMORY = 9
    NO_PACKAGE = 10
    UNKNOWN_VERSION = 11
    BUG = 70
    INTERRUPTED = 130
    TERMINATED = 143


class AnswerIsNo(Exception):
    """A command did its work and the answer is no; the message says what was found."""


class NotAllChecked(Exception):
    """Nothing that a command checked is wrong, but it could not check all; says what not."""


class Terminated(BaseException):
    """SIGTERM arrived; unwinds like Ctrl-C does."""


def exit_of(error: BaseException) -> Exit:
    """Return the code for an error that ended a command."""
    table: tuple[tuple[type[BaseException], Exit], ...] = (
        (AnswerIsNo, Exit.NO),
        (NotAllChecked, Exit.NOT_CHECKED),
        (NoGpu, Exit.NO_GPU),
        (TooLittleMemory, Exit.GPU_MEMORY),
        (NoPackage, Exit.NO_PACKAGE),
        (UnknownVersion, Exit.UNKNOWN_VERSION),
        (CannotTest, Exit.NOT_CHECKED),
        (ConfigError, Exit.USAGE),
        (PoolInUse, Exit.IN_USE),
        (SetupError, Exit.SETUP),
        (ExpectedError, Exit.AWAY),
        (httpx.HTTPError, Exit.AWAY),
        (InvariantBroken, Exit.BROKEN),
        (KeyboardInterrupt, Exit.INTERRUPTED),
        (Terminated, Exit.TERMINATED),
    )
    return next((code for kind, code in table if isinstance(error, kind)), Exit.BUG)
