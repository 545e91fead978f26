"""SGLang on a CPU without two packages that it imports: its kernels, published for CUDA only, and torchvision.

SGLang imports names from ``sgl_kernel`` in many modules and calls few of them on a CPU with plain attention and sampling; what
it imports from torchvision serves vision models. This module provides packages of those names whose attributes raise when they
are called. Its adapters want pinned memory, which torch refuses where there is nothing to copy to; here it is ordinary memory.
Nothing here runs where there is a GPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, MutableSequence, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

import torch


class _Missing:
    """Stands in for a missing function, class or constant; raises when it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _attribute(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"SGLang called {self._name}, which is not installed here and has no CPU version.")


class _StandIn(ModuleType):
    """A module that has every attribute."""

    __path__: MutableSequence[str] = []  # noqa: RUF012  # what makes it a package

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name)


def _attribute(owner: str, name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"{owner}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of the given packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return function(*args, **kwargs)

    return make


def install() -> None:
    """Answer imports of the missing packages, and ask for no pinned memory, from now on in this process.

    SGLang's adapters write ``pin_memory=True`` as a constant in calls deep inside their functions, where neither an argument of
    the server nor a hook of its registry reaches; so the four makers of tensors that they call drop it, in server processes on
    a CPU alone, where pinning has no meaning.
    """
    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign,assignment,return-value]
    # transformers looks once whether torchvision is there and remembers; it must not find the stand-in.
    from transformers.utils import is_torchvision_available

    packages = ["sgl_kernel"] if is_torchvision_available() else ["sgl_kernel", "torchvision"]
    sys.meta_path.insert(0, _Finder(packages))
