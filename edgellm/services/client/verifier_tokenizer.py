"""The tokenizer of a verifier on another device: fetched once, checked, and kept by its hash."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio

from edgellm.engine import Model
from edgellm.engine.gguf.writer import MAX_TOKENIZER
from edgellm.engine.model import load_tokenizer
from edgellm.errors import (
    SAME_VERSION,
    EdgeError,
    InvalidOption,
    ModelCorrupt,
    ModelUnsupported,
    NotPermitted,
    ProtocolError,
    VerifierUnreachable,
)
from edgellm.rpc.address import ModelAddress
from edgellm.rpc.channel import TOKENIZER, run_in_network_loop
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import MAX_TOKENIZER_PART, parse_message
from edgellm.services.client.link import dial
from edgellm.services.handshake import printable
from edgellm.state import write_state
from edgellm.system import cache_dir

MOST_KEPT = 256 * 2**20
"""Bytes of all tokenizers that are kept, the least recently used leaving first."""
_SECONDS = 300.0  # limit for a whole tokenizer
_SILENT_SECONDS = 10.0  # limit for each part of a tokenizer

OnProgress = Callable[[float], None]


def open_tokenizer(
    where: ModelAddress, sha256: str, *, trust: Trust | None = None, device: DeviceID | None = None,
    progress: OnProgress | None = None,
) -> Model:  # fmt: skip
    """Return the tokenizer with this hash (hex) of the verifier at `where`, as a model without weights; it is fetched
    unless it is kept already. With `trust`, the connection uses mutual TLS to a paired device, or to the given `device`
    only. `progress` is called with the share that has come. Raises ProtocolError: the verifier sends another tokenizer,
    which is not kept; VerifierUnreachable, NotPermitted: it sends nothing; NotPaired, PairingRequired, IdentityClash:
    it is not a device that trusts this one, and is trusted; InvalidOption: there is no room to keep it; EngineFailed:
    its trial in a child process could not be made."""
    path = _folder() / f"{sha256}.gguf"
    if path.exists():
        with suppress(ModelCorrupt, ModelUnsupported):  # it is damaged, and fetched again
            model = load_tokenizer(path)
            os.utime(path)
            return model
    data = run_in_network_loop(_fetch(where, trust, device, progress)).result()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise unusable(where, "it is not the one that was announced")
    try:
        write_state(path, data)
    except OSError as error:
        raise InvalidOption(
            f"The tokenizer of the verifier at {where} cannot be kept: {error}.", f"Make room in {path.parent}."
        ) from error
    _make_room(path)
    try:
        return load_tokenizer(path)
    except (ModelCorrupt, ModelUnsupported) as error:
        forget_tokenizer(sha256)
        raise unusable(where, error.what.replace(str(path), "it")) from None


def forget_tokenizer(sha256: str) -> None:
    with suppress(OSError):
        (_folder() / f"{sha256}.gguf").unlink()


def unusable(where: ModelAddress, why: str) -> ProtocolError:
    """Return the error for a tokenizer that differs from its verifier's claim; `why` is a clause."""
    return ProtocolError(
        f"The tokenizer that the verifier at {where} sends cannot be used: {why.rstrip('.')}.",
        f"{SAME_VERSION} Or choose a draft model with the verifier's tokenizer.",
    )


async def _fetch(
    where: ModelAddress, trust: Trust | None, device: DeviceID | None, progress: OnProgress | None
) -> bytes:
    """Return the tokenizer that the verifier sends, at most `MAX_TOKENIZER` bytes."""
    data, size = bytearray(), 0
    async with await dial(where.address, trust, device) as channel:
        call = channel.unary_stream(TOKENIZER, pb.TokenizerRequest.SerializeToString, bytes)(
            pb.TokenizerRequest(model=where.model), timeout=_SECONDS
        )
        try:
            while True:
                async with asyncio.timeout(_SILENT_SECONDS):
                    message = await call.read()
                if not isinstance(message, bytes):  # the end
                    return bytes(data)
                part = parse_message(pb.TokenizerPart, message, MAX_TOKENIZER_PART)
                size = size or part.size
                if not part.data:
                    raise unusable(where, "a part of it is empty")
                data += part.data
                if max(size, len(data)) > MAX_TOKENIZER:
                    raise unusable(where, f"it has more than {MAX_TOKENIZER} bytes")
                if progress is not None and size:
                    progress(min(1.0, len(data) / size))
        except grpc.aio.AioRpcError as error:
            raise _refused(where, error) from None
        except TimeoutError:
            raise VerifierUnreachable(
                f"The verifier at {where} has stopped sending its tokenizer.", "Check the connection, and try again."
            ) from None
        finally:
            call.cancel()


def _refused(where: ModelAddress, error: grpc.aio.AioRpcError) -> EdgeError:
    why = printable(error.details() or error.code().name)
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return NotPermitted(f"The verifier at {where} refuses.", why)
    return VerifierUnreachable(
        f"The verifier at {where} does not send its tokenizer ({why.rstrip('.')}).",
        "Try again, or choose a draft model with the verifier's tokenizer.",
    )


def _folder() -> Path:
    return cache_dir() / "tokenizers"


def _make_room(own: Path) -> None:
    """Remove the tokenizers that were used least recently until the others, with `own`, take at most `MOST_KEPT`."""
    kept = []
    for path in own.parent.glob("*.gguf"):
        with suppress(OSError):  # another process has removed it
            kept.append((path != own, -path.stat().st_mtime, path.stat().st_size, path))
    left = MOST_KEPT
    for other, _, size, path in sorted(kept):
        left -= size
        if other and left < 0:
            with suppress(OSError):
                path.unlink()
