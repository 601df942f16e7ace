"""Write a CycloneDX bill of materials of what a user installs: ``python scripts/sbom.py [FILE]``.

It lists every package of requirements.lock and requirements-cuda.lock with its version and hashes, and the
dependencies between the packages that are installed here.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from uuid import UUID, uuid5

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lock import CUDA_LOCK, LOCK, ROOT, Pin, digest_of, parse

_NAMESPACE = UUID("5d4c5f3e-6f0b-4a55-9d50-1f5d7f4a3c10")


def component_of(pin: Pin) -> Component:
    """Return the component of one locked package. Its files are in the order of their hashes."""
    url = PackageURL("pypi", name=pin.name, version=pin.version)
    files = [
        ExternalReference(
            type=ExternalReferenceType.DISTRIBUTION,
            url=XsUri(str(url)),
            comment=f"file {number}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one.removeprefix("sha256:"))],
        )
        for number, one in enumerate(pin.hashes, 1)
    ]
    return Component(
        type=ComponentType.LIBRARY,
        name=pin.name,
        version=pin.version,
        purl=url,
        bom_ref=str(url),
        external_references=files,
    )


def needs_of(name: str) -> set[str]:
    """Return the names that an installed package requires on this platform, extras apart."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return set()
    wanted = [Requirement(line) for line in lines]
    return {
        canonicalize_name(one.name) for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})
    }


def make_bom(root: Path) -> Bom:
    """Return the bill of materials of the locks in ``root``."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    about = project["project"]
    bom = Bom(serial_number=uuid5(_NAMESPACE, digest_of(project)))
    main = Component(
        type=ComponentType.APPLICATION, name=about["name"], version=about["version"], bom_ref=about["name"]
    )
    bom.metadata.component = main
    pins = {
        name: pin
        for lock in (LOCK, CUDA_LOCK)
        for name, pin in parse((root / lock).read_text("utf-8")).items()
    }
    components = {name: component_of(pin) for name, pin in sorted(pins.items())}
    for name, component in components.items():
        bom.components.add(component)
        bom.register_dependency(component, [components[one] for one in needs_of(name) if one in components])
    direct = {canonicalize_name(Requirement(line).name) for line in about["dependencies"]}
    bom.register_dependency(main, [components[one] for one in sorted(direct)])
    return bom


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "convoy.cdx.json"
    bom = make_bom(ROOT)
    out.parent.mkdir(parents=True, exist_ok=True)
    JsonV1Dot6(bom).output_to_file(str(out), allow_overwrite=True, indent=1)
    print(f"{out}: {len(bom.components)} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
