"""What installed packages add: model families, codecs, aggregation rules, directories and transports.

A package declares an entry point in the group of what it adds; the manifest or the role file names the entry point.
p2ptrain's own are declared in a table of the same form, so both are found and loaded in one way. A manifest names
extensions and never brings code. It pins the packages that bring them (``packages``), so that all peers run the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Generic, TypeVar, cast

from p2ptrain.errors import IncompatibleError

T = TypeVar("T")


class Extensions(Generic[T]):
    """All things of one kind, by name: p2ptrain's own, and those of installed packages. Each is loaded once.

    An entry point leads to an instance, or to a class that takes no arguments. p2ptrain's own names cannot be replaced.
    """

    def __init__(
        self,
        group: str,
        what: str,
        kind: Callable[..., T],
        own: Mapping[str, str],
        check: str = "",
    ) -> None:
        """
        Args:
            group: Of entry points.
            what: What each is, for messages.
            kind: The class that all of them are of.
            own: p2ptrain's own: ``module:attribute`` by name.
            check: ``module:function`` that raises what is wrong with one that a package brings; empty for none.
        """
        self.own = tuple(own)
        self._group = group
        self._what = what
        self._kind = cast(type[T], kind)
        self._own = {name: EntryPoint(name, value, group) for name, value in own.items()}
        self._check = EntryPoint("check", check, group) if check else None
        self._loaded: dict[str, T] = {}

    def names(self) -> tuple[str, ...]:
        """Return all names, p2ptrain's own first. Reads the metadata of all packages: not for busy code."""
        return tuple(dict.fromkeys([*self.own, *(point.name for point in entry_points(group=self._group))]))

    def get(self, name: str) -> T:
        """Return what is called ``name``.

        Raises:
            IncompatibleError: No installed package brings it, or what one brings cannot be used.
        """
        if name in self._loaded:
            return self._loaded[name]
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
        self._loaded[name] = found
        return found

    def find(self, name: str) -> EntryPoint:
        """Return where ``name`` leads, without loading it.

        Raises:
            IncompatibleError: No installed package brings it.
        """
        point = self._own.get(name) or next(iter(entry_points(group=self._group, name=name)), None)
        if point is None:
            raise IncompatibleError(
                f"unknown {self._what} {name!r}; this machine has {', '.join(self.names())}: correct the name, update "
                f"p2ptrain, or install the package that brings it (an entry point of the group {self._group})"
            )
        return point

    def package_of(self, name: str) -> str:
        """Return ``PACKAGE==VERSION`` of the package that brings ``name``; empty for p2ptrain's own."""
        package = self.find(name).dist
        return f"{package.name}=={package.version}" if package is not None else ""


def check_packages(packages: Iterable[str]) -> None:
    """Refuse to take part without the packages that the manifest pins.

    Args:
        packages: Each ``PACKAGE==VERSION``.

    Raises:
        IncompatibleError: One is missing or has another version; says what to install.
    """
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
    """An extension breaks a promise of its kind's contract."""


def require(is_kept: bool, promise: str) -> None:
    """Raise `ContractError` unless a promise is kept."""
    if not is_kept:
        raise ContractError(f"it breaks its contract: {promise}")
