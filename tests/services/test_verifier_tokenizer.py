"""A verifier's tokenizer on its way to a device: fetched once, and nothing of a hostile one is kept."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from edgellm.engine import Model, ModelFile, Vocabulary
from edgellm.engine.gguf.writer import tokenizer_file
from edgellm.errors import ProtocolError, VerifierUnreachable, VocabularyMismatch
from edgellm.rpc.address import Address
from edgellm.rpc.channel import TOKENIZER
from edgellm.rpc.link import Endpoint
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.client import verifier_selection
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.client.verifier_selection import forget_tokenizer, open_tokenizer
from edgellm.services.server.servers import VerifierServer
from edgellm.storage.model_files import name_of
from tests.services.conftest import ANYWHERE
from tests.services.scripted import scripted
from tests.services.test_verifier_client import different

NOWHERE = Endpoint("", Address("127.0.0.1", 1))


@pytest.fixture
def folder(home: Path) -> Path:
    """Where tokenizers are kept."""
    return home / "cache" / "tokenizers"


@pytest.fixture(scope="module")
def whole(exact: Model) -> bytes:
    """What the verifier sends."""
    return tokenizer_file(exact.file, name_of(exact.path))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*")) if folder.exists() else []


def parts(data: bytes, size: int = 2**16) -> Callable[[int], pb.TokenizerPart]:
    """Return a function that sends `data` in parts."""
    return lambda at: pb.TokenizerPart(data=data[at : at + size], size=len(data))


def test_it_is_fetched_once_and_kept_by_its_hash(server: VerifierServer, whole: bytes, folder: Path) -> None:
    shares: list[float] = []
    where = Endpoint("", server.address)
    with open_tokenizer(where, sha256(whole), progress=shares.append) as model:
        assert model.vocabulary == server.model.vocabulary
        assert model.chat_template_source == server.model.chat_template_source
    assert shares[-1] == 1.0
    assert kept(folder) == [f"{sha256(whole)}.gguf"]
    assert (folder / kept(folder)[0]).stat().st_mode & 0o077 == 0
    with open_tokenizer(NOWHERE, sha256(whole)) as model:  # nothing is asked for
        assert model.vocabulary == server.model.vocabulary


def test_another_models_tokenizer_is_not_sent(server: VerifierServer) -> None:
    with grpc.insecure_channel(str(server.address)) as channel:
        send = channel.unary_unary(TOKENIZER, bytes, bytes)
        for request, status in (
            (pb.TokenizerRequest(model="other").SerializeToString(), grpc.StatusCode.NOT_FOUND),
            (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                send(request)
            assert caught.value.code() is status


def test_a_mismatch_says_whether_the_tokenizer_is_sent(server: VerifierServer, exact: Model, whole: bytes) -> None:
    other = different(exact.vocabulary)
    with pytest.raises(VocabularyMismatch) as sending:
        RemoteVerifier(server.address, other)
    assert sending.value.tokenizer == sha256(whole)
    with (
        scripted(exact.vocabulary) as address,
        pytest.raises(VocabularyMismatch, match="does not send its tokenizer") as silent,
    ):
        RemoteVerifier(address, other)
    assert silent.value.tokenizer == ""


def _refused(vocabulary: Vocabulary, folder: Path, sent: bytes, said: str, announced: bytes | None = None) -> None:
    """Check that a tokenizer that a verifier sends is refused, and that nothing of it is kept."""
    with scripted(vocabulary, tokenizer=parts(sent)) as address, pytest.raises(ProtocolError, match=said):
        open_tokenizer(Endpoint("", address), sha256(sent if announced is None else announced))
    assert kept(folder) == []


def test_what_is_no_tokenizer_is_refused_and_not_kept(
    vocabulary: Vocabulary, folder: Path, whole: bytes, f32_pair: tuple[Path, Path]
) -> None:
    _refused(vocabulary, folder, b"not a GGUF file, but long enough", "not a GGUF file")
    _refused(vocabulary, folder, whole[:-2000], "cannot be used: it ")
    _refused(vocabulary, folder, whole[:1000], "not the one that was announced", whole)
    _refused(vocabulary, folder, b"", "a part of it is empty", whole)
    _refused(vocabulary, folder, whole.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.nokens"), "cannot be used")
    _refused(vocabulary, folder, f32_pair[0].read_bytes(), "more than a tokenizer")
    _refused(vocabulary, folder, whole[:40] + bytes(8) + whole[48:], "cannot be used")


@pytest.mark.parametrize(("size", "data"), [(2**24, 2**16), (2**62, 2**16), (0, 2**24 // 2), (9, 0)])
def test_what_does_not_end_is_not_read_for_ever(
    vocabulary: Vocabulary, folder: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch, size: int, data: int
) -> None:
    monkeypatch.setattr(verifier_selection, "MAX_TOKENIZER", len(whole) - 1)
    sent = 0

    def endless(_offset: int) -> pb.TokenizerPart:
        nonlocal sent
        sent += 1
        return pb.TokenizerPart(data=bytes(data), size=size)

    said = f"more than {len(whole) - 1} bytes" if data else "a part of it is empty"
    with scripted(vocabulary, tokenizer=endless) as address, pytest.raises(ProtocolError, match=said):
        open_tokenizer(Endpoint("", address), sha256(whole))
    assert sent == 1
    assert kept(folder) == []


def test_one_that_does_not_come_is_said(vocabulary: Vocabulary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(vocabulary) as address, pytest.raises(VerifierUnreachable, match="does not send its tokenizer"):
        open_tokenizer(Endpoint("", address), "00" * 32)
    monkeypatch.setattr(verifier_selection, "READ_TIMEOUT_SECONDS", 0.2)
    given_up = threading.Event()

    def silent(offset: int) -> pb.TokenizerPart:
        given_up.wait(60 if offset else 0)
        return pb.TokenizerPart(data=b"GGUF", size=100)

    with scripted(vocabulary, tokenizer=silent) as address:
        with pytest.raises(VerifierUnreachable, match="does not send its tokenizer"):
            open_tokenizer(Endpoint("", address), "00" * 32)
        given_up.set()
    assert kept(folder) == []


def test_a_damaged_copy_is_fetched_again(server: VerifierServer, whole: bytes, folder: Path) -> None:
    where = Endpoint("", server.address)
    open_tokenizer(where, sha256(whole)).close()
    path = folder / f"{sha256(whole)}.gguf"
    path.write_bytes(whole[:500])
    open_tokenizer(where, sha256(whole)).close()
    assert path.read_bytes() == whole
    forget_tokenizer(sha256(whole))
    forget_tokenizer(sha256(whole))
    assert kept(folder) == []


def test_the_least_recently_used_ones_make_room(
    server: VerifierServer, whole: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    for age, name in enumerate(("new", "old")):
        other = folder / f"{name}.gguf"
        other.write_bytes(bytes(1000))
        os.utime(other, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(verifier_selection, "MOST_KEPT", len(whole) + 1500)
    open_tokenizer(Endpoint("", server.address), sha256(whole)).close()
    assert kept(folder) == sorted((f"{sha256(whole)}.gguf", "new.gguf"))


def test_a_model_file_that_is_gone_is_verified_with_all_the_same(exact: Model, tmp_path: Path) -> None:
    """Its tokenizer is not sent then."""
    path = tmp_path / "gone.gguf"
    path.write_bytes(exact.path.read_bytes())
    with Model.load(ModelFile.open(path)) as model:
        path.unlink()
        with (
            VerifierServer(model, ANYWHERE, sessions=1, context=64, threads=1) as server,
            pytest.raises(VocabularyMismatch) as caught,
        ):
            RemoteVerifier(server.address, different(exact.vocabulary))
    assert caught.value.tokenizer == ""
