"""Decoders of data from users, files and announcements: names, lists, and GGUF headers, which llama.cpp then loads."""

import operator
import os
import random
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from zeroconf import ServiceInfo

from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.gguf.reader import check_gguf
from edgellm.errors import EdgeError, InvalidOption
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.mdns import ServiceKind, parse_announcement
from edgellm.rpc.trust.identity import parse_short
from edgellm.rpc.trust.pairing import Code
from edgellm.rpc.trust.trust import Peers
from edgellm.storage.model_files import parse_hub_name, resolve
from testkit.gguf.random_model import write
from testkit.hostile.loader import Loader
from tests.engine.conftest import TINY
from tests.fuzz.link_messages import paired
from tests.fuzz.reading import Outcome, Reader

_NUMBERS = (0, 1, 2, 63, 64, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)

_LOAD = """
import sys
from pathlib import Path
from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.errors import EdgeError
for line in sys.stdin:
    try:
        with Model.load(Path(line.strip())) as model:
            model.chat_prompt([Message("user", "hello")])
            with Context(model, ContextSpec(n_ctx=16, threads=1)) as context:
                context.decode(model.tokenize("hello")[:8])
        said = "loaded"
    except EdgeError as error:
        said = type(error).__name__ + ": " + error.what
    except Exception as error:
        said = "!" + type(error).__name__ + ": " + str(error)
    print(said.replace("\\n", " "), flush=True)
"""


def _text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


def _hub_name(text: str) -> None:
    name = parse_hub_name(text)
    if {"/", "\\", "..", "\0"} & set(name.folder) or ".." in str(name) or not name.folder.isascii():
        raise AssertionError(f"{text!r} leads out of the cache")


def readers(folder: Path) -> list[Reader]:
    """Return readers of typed, announced and stored text, the last in files below `folder`."""
    own, _ = paired(folder / "there")
    short = own.identity.id.short.encode()
    listed = folder / "listed"
    listed.mkdir(mode=0o700)

    def peers(data: bytes) -> None:
        Peers(listed).all()
        path = listed / "peers.json"
        path.write_bytes(data)
        path.chmod(0o600)
        try:
            Peers(listed).all()
        finally:
            path.unlink()

    def announced(data: bytes) -> None:
        info = ServiceInfo(
            ServiceKind.DEVICE.value, f"x.{ServiceKind.DEVICE.value}", port=50151, parsed_addresses=["10.0.0.2"],
            properties=dict(part[:250].partition(b"=")[::2] for part in data.split(b"\0")),
        )  # fmt: skip
        if parse_announcement(info, local=False) is None:
            raise InvalidOption("It is not one of ours.", "Ignore it.")

    names = [
        b"hf.co/user/repo:Q4_K_M", b"user/repo@Q8_0", b"edgellm-draft", b"~/x.gguf", b"a/../../etc/passwd",
        b"../x.gguf",
    ]  # fmt: skip
    return [
        Reader("addresses", [b"127.0.0.1:50151", b"[::1]:1", b"desk.local:80"], _text(Address.parse)),
        Reader("codes", [b"7-lamp-otter", b"99 zeb zig"], _text(Code.parse)),
        Reader("short devices", [short], _text(parse_short)),
        Reader("model names", names[:2], _text(_hub_name)),
        Reader("models", names, _text(resolve)),
        Reader("announcements", [b"id=" + short + b"\0v=1\0i=0123456789abcdef"], announced),
        Reader("paired devices", [(folder / "there" / "peers.json").read_bytes()], peers),
    ]


def headers(count: int, seed: int, folder: Path) -> Outcome:
    """Try `count` GGUF files with changed headers: none may harm the check, and none that passes may kill llama.cpp."""
    rng, done = random.Random(f"headers/{seed}"), Outcome()
    sound = folder / "sound.gguf"
    write(sound, TINY, "Q8_0")
    whole, header = sound.read_bytes(), check_gguf(sound)
    places = [*header.value_offsets.values()]
    path = folder / "changed.gguf"
    # Files that pass the check are loaded at once, without a trial in a child process.
    with closing(Loader(_LOAD, {**os.environ, "EDGELLM_PROBE": "off"})) as loader:
        for number in range(count):
            path.write_bytes(_changed(whole, header.data_offset, places, rng))
            try:
                _keeps_its_promises(check_gguf(path), path.stat().st_size)
            except EdgeError:
                done.refused += 1
                continue
            except Exception as error:  # noqa: BLE001 - finding these is what this is for
                done.strange.append(f"header {number}: {type(error).__name__}: {error}")
                continue
            outcome = loader.load(path)
            if outcome.startswith("!"):
                done.strange.append(f"header {number}: {outcome}")
            done.taken += outcome == "loaded"
            done.refused += outcome != "loaded"
    return done


def _keeps_its_promises(header: GgufHeader, size: int) -> None:
    """Raise AssertionError unless every place in a header that was taken lies in the file, behind the one before."""
    ends = [header.data_offset, *(tensor.offset + tensor.nbytes for tensor in header.tensors)]
    starts = [*(tensor.offset for tensor in header.tensors if tensor.nbytes), size]
    places = all(offset <= size for offset in header.value_offsets.values())
    if not (header.file_size == size and places and all(map(operator.le, ends, starts))):
        raise AssertionError(f"a header of lies got through: {header}")


def _changed(whole: bytes, end: int, places: list[int], rng: random.Random) -> bytes:
    made = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.choice((rng.randrange(end), rng.choice(places), rng.choice(places) - 4, 8, 16))
        value = rng.choice((struct.pack("<Q", rng.choice(_NUMBERS)), rng.randbytes(rng.randrange(1, 9))))
        match rng.randrange(5):
            case 0 | 1:
                made[at : at + len(value)] = value
            case 2:
                made[at] ^= 1 << rng.randrange(8)
            case 3:
                made[at:at] = value
            case _:
                del made[at : at + rng.choice((1, 4, 8, 64))]
    return bytes(made)
