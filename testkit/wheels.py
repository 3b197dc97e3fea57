"""Python wheels with a model in them, and pip told to find them in a folder."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

from edgellm.storage.catalog import CatalogModel, Wheel

_METADATA = "Metadata-Version: 2.1\nName: {0}\nVersion: {1}\nRequires-Dist: a-package-that-does-not-exist\n"
_KIND = "Wheel-Version: 1.0\nGenerator: testkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, model: CatalogModel, gguf: Path) -> CatalogModel:
    """Write a wheel with a GGUF into `folder`, and return the model of the catalogue as one that comes in it. Its code
    fails when it is run."""
    if model.wheel is None:
        raise ValueError(f"{model.name} comes in no wheel")
    name, version = model.wheel.package.replace("-", "_"), model.wheel.version
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, model.wheel.member)
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('its code was run')\n")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", _METADATA.format(model.wheel.package, version))
        archive.writestr(f"{name}-{version}.dist-info/WHEEL", _KIND)
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
    files = path.read_bytes(), gguf.read_bytes()
    sizes, hashes = [len(data) for data in files], [hashlib.sha256(data).hexdigest() for data in files]
    wheel = Wheel(model.wheel.package, version, sizes[0], hashes[0], model.wheel.member, sizes[1], hashes[1])
    return replace(model, wheel=wheel, size=2 * sizes[1])
