"""Records beside the files of a release: an SBOM of each distribution, checksums, and an index with hashes."""

import platform
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from tools.release.checking import INDEX, digest, index, metadata

SUMS = "SHA256SUMS"


def write(folder: Path, files: list[Path], epoch: int) -> None:
    """Write an SBOM of each distribution, INDEX and SUMS for the files of a release, all of them in this folder."""
    sboms = []
    for wheel in (path for path in files if path.suffix == ".whl"):
        sdist = next(path for path in files if path.name.startswith(f"{_stem(wheel)}.tar"))
        sboms.append(folder / f"{_stem(wheel)}.cdx.json")
        sboms[-1].write_text(_sbom(metadata(wheel), (wheel, sdist), epoch))
    (folder / INDEX).write_text(index(files))
    sums = (f"{digest(path)}  {path.name}\n" for path in sorted([*files, *sboms, folder / INDEX]))
    (folder / SUMS).write_text("".join(sums))


def _stem(wheel: Path) -> str:
    """`NAME-VERSION`."""
    return "-".join(wheel.name.split("-")[:2])


def _sbom(about: Metadata, files: Iterable[Path], epoch: int) -> str:
    """A CycloneDX SBOM: the distribution with its files, and what it needs, with the versions that it accepts."""
    whole = Component(
        name=about.name,
        version=str(about.version),
        type=ComponentType.LIBRARY,
        bom_ref=about.name,
        description=about.summary,
        licenses=[LicenseExpression(str(about.license_expression))],
        purl=PackageURL("pypi", name=about.name, version=str(about.version)),
        properties=[
            Property(name="builder", value=f"hatchling {version('hatchling')}"),
            Property(name="python", value=platform.python_version()),
        ],
        components=[_file(path) for path in files],
    )
    parts = [_needed(requirement) for requirement in about.requires_dist or ()]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{whole.purl}#{''.join(map(digest, files))}")
    bom = Bom(components=parts, serial_number=serial)
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    bom.metadata.component = whole
    bom.register_dependency(whole, parts)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"the SBOM of {about.name} is not CycloneDX: {error}")
    return text + "\n"


def _file(path: Path) -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest(path))]
    return Component(name=path.name, type=ComponentType.FILE, bom_ref=path.name, hashes=hashes)


def _needed(requirement: Requirement) -> Component:
    """A dependency; for which extra, if any, and which versions are accepted, as properties."""
    accepted = {"versions": str(requirement.specifier), "marker": str(requirement.marker or "")}
    exact = [pin.version for pin in requirement.specifier if pin.operator == "=="]
    pinned = exact[0] if exact else None
    return Component(
        name=requirement.name,
        version=pinned,
        type=ComponentType.LIBRARY,
        bom_ref=str(requirement),
        purl=PackageURL("pypi", name=requirement.name, version=pinned),
        properties=[Property(name=name, value=value) for name, value in accepted.items() if value],
    )
