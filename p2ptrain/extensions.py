"""Extensions by installed packages: model families, codecs, aggregation rules, directories and transports.

A package declares an entry point in the group of an extension's kind. The manifest or the role file names the entry
point. A manifest never carries code; it pins the packages that provide its extensions (``packages``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Generic, TypeVar, cast

from p2ptrain.errors import IncompatibleError

T = TypeVar("T")


class Extensions(Generic[T]):
    """The extensions of one kind, by name: built-in ones, and those of installed packages. Each is loaded once.

    An entry point resolves to an instance, or to a class without constructor arguments. A package cannot override a
    built-in name.

    Attributes:
        get: Returns the extension of a name. Raises `IncompatibleError` if no installed package provides it, it fails
            to load, or it breaks its contract.
    """

    def __init__(self, group: str, what: str, kind: Callable[..., T], own: Mapping[str, str], check: str = "") -> None:
        """
        Args:
            group: The entry point group.
            what: The noun for error messages, such as ``codec``.
            kind: The class of all instances.
            own: ``module:attribute`` of the built-in extensions, by name.
            check: ``module:function`` that raises if a package's extension breaks its contract; empty for none.
        """
        self.own = tuple(own)
        self._group = group
        self._what = what
        self._kind = cast(type[T], kind)
        self._own = {name: EntryPoint(name, value, group) for name, value in own.items()}
        self._check = EntryPoint("check", check, group) if check else None
        self.get: Callable[[str], T] = lru_cache(maxsize=None)(self._load)

    def names(self) -> tuple[str, ...]:
        """Return all names, built-in ones first. Slow: reads the metadata of all installed packages."""
        return tuple(dict.fromkeys([*self.own, *(point.name for point in entry_points(group=self._group))]))

    def _load(self, name: str) -> T:
        point = self.find(name)
        where = f"the {self._what} {name!r} of {point.value}"
        try:
            found = point.load()
            found = found() if isinstance(found, type) else found
        except Exception as error:  # A package's import may raise anything.
            raise IncompatibleError(f"{where} cannot be loaded: {error}") from error
        if not isinstance(found, self._kind):
            raise IncompatibleError(f"{where} is no {self._kind.__module__}.{self._kind.__name__}")
        if self._check is not None and name not in self._own:
            try:
                self._check.load()(found)
            except Exception as error:  # A package's code may raise anything.
                raise IncompatibleError(f"{where} is refused: {error}") from error
        return found

    def find(self, name: str) -> EntryPoint:
        """Return the entry point of ``name`` without loading it; raise `IncompatibleError` if there is none."""
        point = self._own.get(name) or next(iter(entry_points(group=self._group, name=name)), None)
        if point is None:
            raise IncompatibleError(
                f"unknown {self._what} {name!r}; this machine has {', '.join(self.names())}: correct the name, update "
                f"p2ptrain, or install the package that brings it (an entry point of the group {self._group})"
            )
        return point

    def package_of(self, name: str) -> str:
        """Return ``PACKAGE==VERSION`` of the package that provides ``name``; empty for a built-in one."""
        package = self.find(name).dist
        return f"{package.name}=={package.version}" if package is not None else ""


def check_packages(packages: Iterable[str]) -> None:
    """Raise `IncompatibleError` unless all packages that the manifest pins (``PACKAGE==VERSION``) are installed."""
    for package in packages:
        name, _, wanted = package.partition("==")
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise IncompatibleError(
                f"the swarm runs code of the package {name} {wanted}, and this machine has {found}: if you trust it, "
                f"pip install '{package}'"
            )


class ContractError(ValueError):
    """An extension breaks the contract of its kind."""


def require(is_kept: bool, promise: str) -> None:
    """Raise `ContractError` with the broken ``promise`` unless ``is_kept``."""
    if not is_kept:
        raise ContractError(f"it breaks its contract: {promise}")
