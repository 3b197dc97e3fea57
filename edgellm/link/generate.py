"""Makes the Python code of the contract: `python -m edgellm.link.generate` (needs the `dev` extra)."""

from __future__ import annotations

from pathlib import Path

PROTO = Path("edgellm/link/edgellm.proto")
ROOT = Path(__file__).parents[2]


def generate(out: Path) -> tuple[Path, Path]:
    """Writes `edgellm/link/edgellm_pb2.py` and its stub `.pyi` below the folder `out`; returns their paths.

    Raises:
        RuntimeError: the contract does not compile; protoc has said why on stderr.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    code = protoc.main(["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", str(ROOT / PROTO)])
    if code:
        raise RuntimeError(f"protoc ended with {code}")
    module = out / PROTO.with_name("edgellm_pb2.py")
    return module, module.with_suffix(".pyi")


if __name__ == "__main__":
    generate(ROOT)
