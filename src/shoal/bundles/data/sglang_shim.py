# ruff: noqa: INP001 - it is copied into environments, and belongs to no package here
"""Lets SGLang start on a machine without a GPU. Runs at the start of each process of the bundle.

SGLang imports two packages that exist for GPUs only, or whose every use is one this server does
not make: `sgl_kernel` (compiled kernels) and `torchvision` (pictures). Where one is not installed,
an empty stand-in takes its place, whose parts may be named and never called. And it asks for pinned
memory when it runs adapters, which torch refuses where there is no GPU to copy to: there, ordinary
memory is what it gets. Where torch sees a GPU, nothing is changed. Owns these two things; does not
own how the server is started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABSENT = ("sgl_kernel", "torchvision")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


class _Named(type):
    """Names a part of an absent package; its own parts are named in the same way."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_args: object, **_named: object) -> object:
        raise RuntimeError(f"{cls.__name__} was called, and its package is not installed")


class _StandIn(ModuleType):
    """A module of an absent package."""

    __path__ = []  # noqa: RUF012 - as every package has it
    __version__ = "0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{self.__name__}.{name}", (), {})


class _StandIns(MetaPathFinder, Loader):
    """Asked last, so that an installed package is always preferred."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


class _OnSglang(MetaPathFinder):
    """Asked first, for the moment in which a process first imports a part of SGLang.

    Whoever only asks whether SGLang is there is not made to load torch. It finds nothing itself.
    """

    def find_spec(self, fullname: str, *_: object) -> None:
        if not fullname.startswith("sglang."):
            return
        sys.meta_path.remove(self)
        import torch

        if not torch.cuda.is_available():
            sys.meta_path.append(_StandIns())
            unpin(torch)


def unpin(torch: Any) -> None:
    """Has everything of torch that pins memory leave it as it is."""

    def without_pin(factory: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(factory)
        def made(*args: Any, **named: Any) -> Any:
            named.pop("pin_memory", None)
            return factory(*args, **named)

        return made

    for name in _FACTORIES:
        setattr(torch, name, without_pin(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


sys.meta_path.insert(0, _OnSglang())
