"""Stands in for torchvision where it is not installed, so that text models can be served.

vLLM's module of the Qwen3.5 models imports image processing at its top, for the sake of their
multimodal variants. Importing succeeds here; *using* anything fails and says what to install.
Only `millpond.launch` puts this folder on a path, and only where there is no torchvision.
"""

import sys
from types import ModuleType
from typing import NoReturn

__version__ = "0.0.0"


class _Absent:
    """Whatever was imported by name; it may be mentioned but not used."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"{self.__name__}: install torchvision to process images or videos")


class _AbsentModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, so that its submodules can be imported

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


for _name in (
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
):
    sys.modules[_name] = _AbsentModule(_name)
