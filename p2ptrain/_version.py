"""The package version, read by the build and by ``p2ptrain --version``."""

__version__ = "0.1.0.dev0"
