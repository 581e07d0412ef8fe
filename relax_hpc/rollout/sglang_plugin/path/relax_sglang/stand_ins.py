"""Import-time stand-ins for packages that SGLang imports on a CPU but never calls there.

A stand-in is used only if the real package is missing: the finders come last on `sys.meta_path`.
triton          decorators pass functions through, everything else is an inert object
sgl_kernel      every name exists and raises NotImplementedError when called
torchvision     PyPI's wheel is linked against CUDA and cannot register its operators beside a CPU
                torch; its Python code needs two of them to be *declared*
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def install() -> None:
    """Register the stand-ins of this process; cheap, imports none of the packages."""
    if any(isinstance(finder, _TorchvisionOps) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _TorchvisionOps())
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(_StandInFinder("triton", _make_triton))
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.meta_path.append(_StandInFinder("sgl_kernel", _MissingModule))


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a package of one name and all that is imported below it."""

    def __init__(self, package: str, make: Callable[[str], types.ModuleType]) -> None:
        self._package, self._make = package, make

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._package and not fullname.startswith(self._package + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        parent, _, name = spec.name.rpartition(".")
        # `triton.language` may have been handed out as an attribute before it is imported
        seen = vars(sys.modules[parent]).get(name) if parent in sys.modules else None
        return seen if isinstance(seen, _InertModule) else self._make(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class _InertClass:
    """Base of stand-in classes: can be subclassed and built with any arguments."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__()

    def __init__(self, *args: object, **kwargs: object) -> None: ...


class _InertModule(types.ModuleType):
    """A module whose every attribute exists; used as a decorator it gives the function back."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value: Any = sys.modules.get(full)
        if value is None:  # capital letter: a class, e.g. triton.Config
            value = type(name, (_InertClass,), {}) if name[:1].isupper() else _InertModule(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda function=None, *rest, **options: function

    def __getitem__(self, key: object) -> "_InertModule":
        return self

    def __iter__(self) -> Iterator[object]:  # without it, dynamo walks __getitem__ for ever
        return iter(())

    def __contains__(self, key: object) -> bool:
        return False


def _make_triton(name: str) -> types.ModuleType:
    module = _InertModule(name)
    if name == "triton":
        vars(module).update(
            __version__="3.0.0",
            cdiv=lambda a, b: -(-a // b),
            next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
        )
    if name == "triton.language":
        vars(module).update(constexpr=_Constexpr, dtype=type("dtype", (), {}))
    return module


class _Constexpr:
    def __init__(self, value: object = None) -> None:
        self.value = value


class _MissingModule(types.ModuleType):
    """A module whose every name can be imported and raises when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self._name}: no such kernel on this machine (CPU stand-in)")


class _TorchvisionOps(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators when torchvision is about to be imported; finds nothing."""

    _library: object = None

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> None:
        if fullname != "torchvision" or self._library is not None:
            return
        import torch

        if torch.cuda.is_available():
            return
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        self._library = library  # its end would undo the definitions
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
