"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version that is installed; ``"0+unknown"`` where the package is not."""
    try:
        return version("shardwright")
    except PackageNotFoundError:
        return "0+unknown"
