"""The version and features of a session, a pure function of both sides' terms (spec/v1/negotiation.md)."""

from collections.abc import Sequence

import attrs

from kvproto.errors import RemoteError, listed
from kvproto.session.limits import MAX_TRANSFERS
from kvproto.wire import tables
from kvproto.wire.enums import ErrorCode, Feature
from kvproto.wire.messages import Limits, Version, VersionRange, Welcome

SPOKEN = (VersionRange(major=tables.MAJOR, min_minor=0, max_minor=tables.MINOR),)
"""The versions that this package supports."""
LIMITS = Limits(max_body=tables.MAX_BODY, max_transfers=MAX_TRANSFERS)
"""The limits of this package as a receiver, as Hello and Welcome state them."""

_SHOWN = 16
"""The most versions or features that an error lists; a peer may state thousands."""


@attrs.frozen
class Terms:
    """The terms of one side: the features that it offers and needs, and its versions, best first."""

    offered: tuple[int, ...] = ()
    needed: tuple[int, ...] = ()
    versions: tuple[VersionRange, ...] = SPOKEN


Chosen = tuple[Version, tuple[int, ...]]
"""The version and features of a session, as Welcome states them."""


def negotiate(sink: Terms, source: Terms) -> Chosen:
    """Choose the version and the features of Welcome (KVP-NEG-*); raises RemoteError: NO_VERSION, FEATURE_MISSING."""
    spoken = {versions.major: versions for versions in source.versions}
    both = [(versions, spoken[versions.major]) for versions in sink.versions if versions.major in spoken]
    common = [(a.major, max(a.min_minor, b.min_minor), min(a.max_minor, b.max_minor)) for a, b in both]
    version = next(((major, high) for major, low, high in common if low <= high), None)
    if version is None:
        mine, yours = _ranges(source.versions), _ranges(sink.versions)
        raise RemoteError(ErrorCode.NO_VERSION, "versions", mine, yours, "upgrade the older of the two")
    for path, needed, offered in (("needed", sink.needed, source.offered), ("offered", source.needed, sink.offered)):
        missing = sorted(set(needed) - set(offered))
        if missing:
            ours, theirs = (offered, missing) if path == "needed" else (missing, offered)
            advice = "offer it, or do not need it"
            raise RemoteError(ErrorCode.FEATURE_MISSING, path, _names(ours), _names(theirs), advice)
    return Version(major=version[0], minor=version[1]), tuple(sorted(set(sink.offered) & set(source.offered)))


_BUG = "this is a bug of the source"


def check_version(terms: Terms, welcome: Welcome) -> None:
    """Raise RemoteError(FEATURE_MISSING) for a version that was not offered (KVP-NEG-CHECK)."""
    version = welcome.version
    if not any(v.major == version.major and v.min_minor <= version.minor <= v.max_minor for v in terms.versions):
        mine, yours = _ranges(terms.versions), f"{version.major}.{version.minor}"
        raise RemoteError(ErrorCode.FEATURE_MISSING, "version", mine, yours, _BUG)


def check_features(terms: Terms, welcome: Welcome) -> None:
    """Raise RemoteError(FEATURE_MISSING) for a feature that was not offered, or one that is needed (KVP-NEG-CHECK)."""
    features = set(welcome.features)
    if not set(terms.needed) <= features <= set(terms.offered):
        mine, yours = _names(terms.offered), _names(welcome.features)
        raise RemoteError(ErrorCode.FEATURE_MISSING, "features", mine, yours, _BUG)


def greased(terms: Terms, seed: int) -> Terms:
    """The terms with a made-up version and feature, so that peers learn to skip unknown ones (KVP-GREASE-SEND)."""
    feature = tables.GREASE_FEATURES[seed % len(tables.GREASE_FEATURES)]
    version = VersionRange(major=tables.GREASE_MAJOR, min_minor=seed % 256, max_minor=255)
    return Terms(tuple(sorted({*terms.offered, feature})), terms.needed, (*terms.versions, version))


def _ranges(versions: tuple[VersionRange, ...]) -> str:
    return listed((f"{v.major}.{v.min_minor}-{v.max_minor}" for v in versions), _SHOWN)


def _names(features: Sequence[int]) -> str:
    known = {int(f): f.name for f in Feature}
    return listed((known.get(f, f"0x{f:04x}") for f in features), _SHOWN) or "(none)"
