"""Generate the Python code of the contract: `python -m tools.protos` (needs the `dev` extra)."""

from pathlib import Path

PROTOS = tuple(
    Path("edgellm/rpc/protos") / f"{name}.proto" for name in ("edgellm", "layers", "mesh", "rpc_engine", "trust")
)
ROOT = Path(__file__).parents[1]


def generate(out: Path) -> list[Path]:
    """Write each `edgellm/rpc/protos/NAME_pb2.py` and its stub `.pyi` below the folder `out`; return their paths.

    Raises:
        RuntimeError: the contract does not compile; protoc has said why on stderr.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    files = [str(ROOT / proto) for proto in PROTOS]
    code = protoc.main(["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", *files])
    if code:
        raise RuntimeError(f"protoc ended with {code}")
    modules = [out / proto.with_name(f"{proto.stem}_pb2.py") for proto in PROTOS]
    return [path for module in modules for path in (module, module.with_suffix(".pyi"))]


if __name__ == "__main__":
    generate(ROOT)
