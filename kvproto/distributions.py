"""The versions of the distributions that are installed, of which all are to be one."""

from importlib.metadata import PackageNotFoundError, requires, version

from kvproto.errors import LocalError
from kvproto.wire.enums import ErrorCode


def check_versions(distribution: str) -> None:
    """Raise LocalError(NO_VERSION) unless the distributions of kvproto that this one needs have its version.

    A package that is on the path alone, without the metadata of an installation, is not checked.
    """
    try:
        own = version(distribution)
    except PackageNotFoundError:
        return
    for requirement in requires(distribution) or ():
        name, _, pin = requirement.partition("==")
        if not name.startswith("kvproto") or ";" in pin:
            continue
        try:
            other = version(name)
        except PackageNotFoundError:
            other = "not installed"
        if other != pin:
            advice = f"pip install {distribution}=={own} {name}=={pin}"
            raise LocalError(ErrorCode.NO_VERSION, distribution, f"{name} {pin}", other, advice)


def absent(engine: str, distribution: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error to raise if an adapter lacks `engine`, a package; any other `error` is returned as it is."""
    if (error.name or "").partition(".")[0] != engine:
        return error
    text = f"{distribution} runs inside of {engine}, which this environment lacks: install both into one"
    return ModuleNotFoundError(text, name=engine)
