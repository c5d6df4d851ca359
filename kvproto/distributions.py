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
