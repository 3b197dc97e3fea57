"""Counts, lengths and offsets of a file are what its real length bears out; models in parts."""

import ctypes
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.engine import GgufHeader, ModelFile, check_gguf, cut, native
from edgellm.engine.gguf.header import TENSOR_TYPES, TensorInfo
from edgellm.engine.trial.probe import Probe
from edgellm.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from edgellm.mesh.layer_costs import costs_of
from testkit.gguf.split_file import entry, split
from tests.engine.headers import F32, LLAMA, Q8_0, Entry, Info, f32, file, numbers, string, strings, u32
from tests.engine.logits import some_ids

BYTES = [b"<0x%02X>" % i for i in range(256)]
SOUND: list[Info] = [(b"a", (32, 2), Q8_0, 0), (b"b", (3,), F32, 96)]


@pytest.fixture
def check(tmp_path: Path) -> Callable[[bytes], GgufHeader]:
    def checked(data: bytes) -> GgufHeader:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return check_gguf(path)

    return checked


Check = Callable[[bytes], GgufHeader]


def test_a_sound_header_says_what_is_in_it(check: Check) -> None:
    entries = [*LLAMA, f32(b"x", 0.5), numbers(b"y", [1, -2]), (b"z", 7, b"\x01"), strings(b"s", [b"", b"ab"])]
    header = check(file(entries, SOUND, 96 + 12))
    assert header.metadata == {
        "general.architecture": "llama", "llama.block_count": 2, "x": 0.5, "y": (1, -2), "z": True,
        "s": header.metadata["s"],
    }  # fmt: skip
    assert [(t.name, t.shape, t.nbytes, t.offset - header.data_offset) for t in header.tensors] == [
        ("a", (32, 2), 68, 0),
        ("b", (3,), 12, 96),
    ]
    assert header.data_offset % header.alignment == 0
    assert (header.version, header.alignment) == (3, 32)


@pytest.mark.parametrize(
    ("said", "name"),
    [(0, "F32"), (1, "F16"), (2, "Q4_0"), (15, "Q4_K_M"), (17, "Q5_K_M"), (30, "IQ4_XS"), (32, "BF16"), (1024, "Q8_0"),
     (4, "Q8_0"), (2**31, "Q8_0"), (None, "Q8_0"), (b"Q4_K_M", "Q8_0")],
)  # fmt: skip
def test_a_file_has_its_types_name_or_that_of_most_weights(check: Check, said: int | bytes | None, name: str) -> None:
    key = b"general.file_type"
    entry = [] if said is None else [u32(key, said) if isinstance(said, int) else string(key, said)]
    infos = [(b"a", (32, 2), Q8_0, 0), (b"b", (60,), F32, 96)]  # that has more bytes, and fewer weights
    header = check(file([*LLAMA, *entry], infos, 96 + 240))
    assert header.quantisation == name
    assert header.main_type == ("Q8_0", 64 / 124)


def test_tensor_types_are_the_librarys_own() -> None:
    library = native.LIBRARY.opened["ggml-base"]
    library.ggml_type_size.restype = library.ggml_blck_size.restype = ctypes.c_size_t
    for kind in range(native.lib.GGML_TYPE_COUNT):
        block, size = library.ggml_blck_size(kind), library.ggml_type_size(kind)
        assert TENSOR_TYPES.get(kind, ("", 0, 0))[1:] == ((block, size) if size else (0, 0))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model file at .*none.gguf.*edgellm pull"):
        check_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound, match="is a folder"):
        check_gguf(tmp_path)


def test_a_file_that_may_not_be_read(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copy(tiny_path, tmp_path))  # that nobody has read yet

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ModelNotFound, match="cannot be read: Permission denied"):
        check_gguf(path)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "has 0 bytes"),
        (b"<!doctype html><html><head>", "begins with b'<!do'"),
        (file(counts=(9, 2)), "claims to hold 9 tensors"),
        (file(counts=(1, 2)), "tensor"),
        (file(counts=(0, 3)), "ends within|empty key"),
        (file(counts=(2**63, 2)), "claims to hold 9223372036854775808 tensors"),
        (file(counts=(0, 65_537)), "claims to hold 65537 metadata entries"),
        (file([*LLAMA, LLAMA[1]]), "'llama.block_count' twice"),
        (file([*LLAMA, u32(b"", 1)]), "empty key"),
        (file([*LLAMA, u32(b"\xff", 1)]), "not UTF-8"),
        (file([*LLAMA, (b"x", 13, b"\0" * 8)]), "unknown value type 13"),
        (file([*LLAMA, (b"x", 9, struct.pack("<IQ", 9, 1) + b"\0" * 32)]), "unknown element type 9"),
        (file([*LLAMA, (b"x", 9, struct.pack("<IQ", 5, 2**61))]), "ends within x"),
        (file([*LLAMA, (b"x", 9, struct.pack("<IQ", 8, 2**61))]), "2305843009213693952 strings for x"),
        (file([*LLAMA, (b"x", 9, struct.pack("<IQQ", 8, 1, 2**63))]), "ends within the strings of x"),
        (file([*LLAMA, (b"x", 8, struct.pack("<Q", 2**40))]), "1099511627776 bytes"),
        (file([*LLAMA, (b"x" * 70_000, 4, b"\0" * 4)]), "a metadata key of 70000 bytes"),
        (file([*LLAMA, u32(b"general.alignment", 0)]), "alignment of 0"),
        (file([*LLAMA, (b"general.alignment", 10, struct.pack("<Q", 32))]), "alignment of 32"),
        (file([*LLAMA, string(b"general.alignment", b"32")]), "alignment of '32'"),
        (file(LLAMA, [SOUND[0], (b"a", (3,), F32, 96)], 108), "tensor 'a' twice"),
        (file(LLAMA, [SOUND[0], (b"b", (3,), F32, 64)], 108), "puts tensor 'b' at 64; 96"),
        (file(LLAMA, SOUND, 107), "has 299 bytes, but tensor 'b' needs 300"),
        (file(LLAMA, [(b"a", (2**32, 2**31), F32, 0)], 64), "the shape"),
        (file(LLAMA, [(b"a", (0,), F32, 0)], 64), "the shape"),
        (file(LLAMA, [(b"a", (33,), Q8_0, 0)], 64), "impossible for Q8_0"),
        (file(LLAMA, [(b"a", (1,) * 5, F32, 0)], 64), "5 dimensions"),
        (file(LLAMA, [(b"a" * 64, (1,), F32, 0)], 64), "a tensor name of 64 bytes"),
        # what llama.cpp would answer with an abort
        (file([LLAMA[0], u32(b"llama.block_count", 0)]), "claims 0 layers"),
        (file([LLAMA[0], u32(b"llama.block_count", 513)]), "claims 513 layers"),
        (file([*LLAMA, u32(b"llama.expert_count", 8), u32(b"llama.expert_used_count", 9)]), "use 9 of 8 experts"),
        (file([*LLAMA, f32(b"llama.attention.layer_norm_rms_epsilon", -1)]), "impossible value -1.0"),
        (file([*LLAMA, f32(b"llama.rope.freq_base", float("nan"))]), "impossible value nan"),
        (file([*LLAMA, strings(b"tokenizer.ggml.tokens", [b"a", b"a\0b"])]), "of which 1 are repeated"),
        (file([*LLAMA, strings(b"tokenizer.ggml.tokens", [b"", b"[EMPTY_0]"])]), "of which 1 are repeated"),
        (
            file([*LLAMA, string(b"tokenizer.ggml.model", b"llama"), strings(b"tokenizer.ggml.tokens", BYTES[:-1])]),
            "lacks byte tokens",
        ),
    ],
)
def test_what_is_corrupt(check: Check, data: bytes, complaint: str) -> None:
    with pytest.raises(ModelCorrupt, match=complaint) as raised:
        check(data)
    assert "Fetch the file again" in raised.value.next_step


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        (lambda: [strings(b"tokenizer.ggml.tokens", [b""] * (2**20 + 1))], "1048577 tokens; 1048576 are possible"),
        (lambda: [string(b"%d" % i, bytes(2**20)) for i in range(33)], "more than 32 MiB"),
        (lambda: [numbers(b"%d" % i, [0] * 512) for i in range(3_000)], "more than 32 MiB"),
    ],
)
def test_what_is_too_much(check: Check, entries: Callable[[], list[Entry]], complaint: str) -> None:
    """Made here: as values of parameters, all processes of a run would make and hold them."""
    with pytest.raises(ModelCorrupt, match=complaint) as raised:
        check(file([*LLAMA, *entries()]))
    assert "Fetch the file again" in raised.value.next_step


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (file(version=1), "GGUF version 1"),
        (file(version=4), "GGUF version 4"),
        (file(version=0x03000000), "big-endian"),
        (file(LLAMA, [(b"a", (32,), 4, 0)], 64), "unknown type 4"),
        (file(LLAMA, [(b"a", (32,), 2**32 - 1, 0)], 64), "unknown type 4294967295"),
    ],
)
def test_what_is_unsupported(check: Check, data: bytes, complaint: str) -> None:
    with pytest.raises(ModelUnsupported, match=complaint):
        check(data)


@pytest.mark.parametrize(
    "entries",
    [
        [string(b"tokenizer.ggml.model", b"llama"), strings(b"tokenizer.ggml.tokens", BYTES)],
        [strings(b"tokenizer.ggml.tokens", [b"", b"", b"a"])],
        [numbers(b"tokenizer.ggml.tokens", [1, 1])],
        [string(b"general.name", b"\xff\xfe")],
    ],
)
def test_what_is_odd_but_sound(check: Check, entries: list[Entry]) -> None:
    assert check(file([*LLAMA, *entries])).version == 3


def test_alignment_moves_the_data(check: Check) -> None:
    infos: list[Info] = [(b"a", (1,), F32, 0), (b"b", (1,), F32, 128)]
    header = check(file([*LLAMA, u32(b"general.alignment", 128)], infos, 132, alignment=128))
    assert header.data_offset % 128 == 0
    assert header.tensors[1].offset == header.data_offset + 128


def test_every_cut_is_noticed(check: Check, tiny_path: Path) -> None:
    whole = tiny_path.read_bytes()
    header = check(whole)
    padding = header.file_size - header.tensors[-1].offset - header.tensors[-1].nbytes
    cuts = [*range(0, header.data_offset, 97), header.data_offset, header.tensors[-1].offset, len(whole) - padding - 1]
    for length in cuts:
        with pytest.raises(ModelCorrupt):
            check(whole[:length])


def test_a_file_that_has_not_changed_is_read_once_and_one_that_has_is_read_again(
    draft_path: Path, verifier_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(draft_path.read_bytes())
    assert check_gguf(path) is not check_gguf(path), "written just now: the next write may have the same time"
    monkeypatch.setattr("edgellm.engine.gguf.reader._SETTLED", -1.0)
    before = check_gguf(path)
    assert check_gguf(path) is before
    path.write_bytes(verifier_path.read_bytes())
    assert check_gguf(path).metadata["llama.block_count"] != before.metadata["llama.block_count"]
    path.unlink()
    with pytest.raises(ModelNotFound):
        check_gguf(path)


def test_a_file_of_lies_is_not_read_whole(tmp_path: Path) -> None:
    """An array that would fill the file is refused before it is read; the file is sparse, and takes no room here."""
    path = tmp_path / "model.gguf"
    path.write_bytes(file([*LLAMA, (b"x", 9, struct.pack("<IQ", 10, 2**30))], counts=(0, 3)))
    with path.open("r+b") as sparse:
        sparse.truncate(2**34)
    with pytest.raises(ModelCorrupt, match="more than 128 MiB before its tensors"):
        check_gguf(path)


# --- models in several files ------------------------------------------------------------------------------------------


IDS = some_ids(40)


@pytest.fixture(scope="module")
def first(verifier_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of three parts of the bundled verifier."""
    return split(verifier_path, tmp_path_factory.mktemp("parts"), 3)


def described(tensor: TensorInfo) -> tuple[object, ...]:
    return tensor.name, tensor.shape, tensor.kind, tensor.nbytes


def bytes_of(file: ModelFile, tensor: TensorInfo) -> bytes:
    with file.paths[tensor.part].open("rb") as source:
        source.seek(tensor.offset)
        return source.read(tensor.nbytes)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.integers(2, 9), empty_first=st.booleans())
def test_all_parts_are_one_model(draft_path: Path, tmp_path: Path, parts: int, empty_first: bool) -> None:
    whole, file = (
        ModelFile.open(draft_path),
        ModelFile.open(split(draft_path, tmp_path, parts, empty_first=empty_first)),
    )
    assert len(file.paths) == parts
    assert list(map(described, file.header.tensors)) == list(map(described, whole.header.tensors))
    for one, other in zip(file.header.tensors, whole.header.tensors, strict=True):
        assert bytes_of(file, one) == bytes_of(whole, other)
    assert file.header.file_size == sum(path.stat().st_size for path in file.paths)
    assert (file.name, file.path) == (whole.name, file.paths[0])
    assert costs_of(file.header) == costs_of(whole.header)


@pytest.mark.parametrize(("start", "last"), [(0, 4), (3, 11), (11, 11)])
def test_cut_layers_are_the_same_bytes(first: Path, verifier_path: Path, tmp_path: Path, start: int, last: int) -> None:
    for head in (False, True):
        names = [tmp_path / f"{name}-{head}.gguf" for name in ("split", "whole")]
        for source, name in zip((first, verifier_path), names, strict=True):
            cut(source, name, start, last, head=head)
        assert names[0].read_bytes() == names[1].read_bytes()


def test_the_trial_of_a_split_model_covers_all_parts(first: Path, tmp_path: Path) -> None:
    file = ModelFile.open(first)
    before = Probe(file).key()
    copies = [tmp_path / path.name for path in file.paths]
    for path, copy in zip(file.paths, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    copies[2].write_bytes(copies[2].read_bytes().replace(entry("split.no", 2), entry("split.no", 7)))
    assert Probe(replace(file, paths=tuple(copies), parts=tuple(map(check_gguf, copies)))).key() != before


# --- parts that are missing, wrong or mixed up ----------------------------------------------------------------------


@pytest.fixture
def parts(draft_path: Path, tmp_path: Path) -> tuple[Path, ...]:
    return ModelFile.open(split(draft_path, tmp_path, 3)).paths


def test_a_later_part_is_not_the_one_to_name(parts: tuple[Path, ...]) -> None:
    with pytest.raises(ModelUnsupported, match=r"one of 3 parts.*ends in -00001-of-00003\.gguf"):
        ModelFile.open(parts[1])


def test_more_parts_than_any_model_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-70000.gguf"
    keys = [(b"split.no", 2, bytes(2)), (b"split.count", 4, (70_000).to_bytes(4, "little"))]
    path.write_bytes(file([*LLAMA, *keys]))
    with pytest.raises(ModelCorrupt, match="one of 70000 parts; 65536 are possible"):
        ModelFile.open(path)


def missing(parts: Sequence[Path], _other: Path) -> None:
    parts[2].unlink()


def cut_short(parts: Sequence[Path], _other: Path) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-64])


def in_another_order(parts: Sequence[Path], _other: Path) -> None:
    second, third = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(third)
    parts[2].write_bytes(second)


def of_two_models(parts: Sequence[Path], other: Path) -> None:
    parts[2].write_bytes(ModelFile.open(other).paths[2].read_bytes())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (missing, r"no model file at .*-00003-of-00003\.gguf"),
        (cut_short, r"-00002-of-00003\.gguf has "),
        (in_another_order, r"00002-of-00003\.gguf is not part 2 of 3"),
        (of_two_models, r"announces \d+ tensors in its 3 parts"),
    ],
)
def test_parts_that_are_spoilt_are_refused(
    parts: tuple[Path, ...], first: Path, spoil: Callable[[Sequence[Path], Path], None], says: str
) -> None:
    spoil(parts, first)
    with pytest.raises((ModelNotFound, ModelCorrupt), match=says):
        ModelFile.open(parts[0])


def test_a_tensor_that_is_there_twice_is_refused(draft_path: Path, tmp_path: Path) -> None:
    paths = ModelFile.open(split(draft_path, tmp_path, 4)).paths
    copy = paths[1].read_bytes()  # with as many tensors as the part that it replaces
    paths[2].write_bytes(copy.replace(entry("split.no", 1), entry("split.no", 2)))
    with pytest.raises(ModelCorrupt, match="in several of its 4 parts"):
        ModelFile.open(paths[0])


def test_a_model_may_be_put_together_from_files_of_any_name(parts: tuple[Path, ...], tmp_path: Path) -> None:
    blobs = [path.rename(tmp_path / f"blob{number}") for number, path in enumerate(parts)]
    assert len(ModelFile.of(blobs).paths) == 3
    with pytest.raises(ModelCorrupt, match="a model of 3 files, not of 2"):
        ModelFile.of(blobs[:2])
    with pytest.raises(ModelUnsupported, match="one of 3 parts"):
        ModelFile.open(blobs[0])
