"""Unit tests of the connector import vLLM, without its compiler.

With the compiler torch imports modules of its own that warn of deprecations, which fail tests.
"""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
