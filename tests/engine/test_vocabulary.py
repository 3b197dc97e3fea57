"""Vocabularies, tokenizers, and the loading of a model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, Message, Model, Vocabulary, native
from edgellm.engine.gguf.reader import check_gguf
from edgellm.engine.model import TEXT_ONLY
from edgellm.engine.vocabulary import DEPTH, LONG, Entry, tokenized
from edgellm.errors import EngineFailed, InvalidOption, ModelUnsupported, PromptTooLong, TextRefused
from testkit.gguf.random_model import CONTROL as MARKS
from testkit.gguf.random_model import Shape, write
from testkit.hostile.inputs import TEXTS
from tests.engine.conftest import MakeModel
from tests.engine.headers import file, string

UNUSED, NORMAL, CONTROL, DEFINED = 2, 4, 8, 16

tokens = st.lists(st.tuples(st.binary(max_size=4), st.sampled_from([4, CONTROL, 32])), min_size=1, max_size=700)


def made(entries: list[tuple[bytes, int]]) -> Vocabulary:
    return Vocabulary.of([piece for piece, _ in entries], bytes(kind for _, kind in entries))


@given(tokens, st.data())
def test_a_changed_token_is_found(entries: list[tuple[bytes, int]], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(entries) - 1))
    piece, kind = entries[at]
    other = [*entries]
    other[at] = (piece + b"x", kind)
    one, two = made(entries), made(other)
    assert one.fingerprint != two.fingerprint
    found = None if kind == CONTROL else at
    assert one.different(two) == two.different(one) == found
    needed = Vocabulary.of(one.pieces, one.kinds, frozenset([at]))
    assert needed.different(two) == two.different(needed) == at


def test_a_shorter_vocabulary_differs_where_it_ends() -> None:
    entries = [(b"%d" % i, 4) for i in range(600)]
    long, short = made(entries), made(entries[:512])
    assert long.different(short) == short.different(long) == 512


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"[PAD300]", DEFINED), (b"", UNUSED)),  # two versions of a converter
        ((b"[PAD300]", UNUSED), (b"<|object_ref_start|>", CONTROL)),
        ((b"<unused7>", NORMAL), (b"<table>", DEFINED)),
        ((b"<|extra_3|>", CONTROL), (b"<|vision|>", CONTROL)),
        ((b"same", NORMAL), (b"same", DEFINED)),
    ],
)
def test_unused_tokens_may_differ_unless_a_conversation_needs_them(one: Entry, other: Entry) -> None:
    entries = [(b"%d" % i, NORMAL) for i in range(300)]
    ours, theirs = made([*entries, one]), made([*entries, other, (b"[PAD301]", UNUSED)])
    for first, second in ((ours, theirs), (theirs, ours)):
        assert first.different(second) is None
    needed = Vocabulary.of(theirs.pieces, theirs.kinds, frozenset([300]))
    assert ours.different(needed) == needed.different(ours) == (None if one[0] == other[0] else 300)


def test_what_a_conversation_needs_is_found_in_the_model(draft_model: Model) -> None:
    vocabulary = draft_model.vocabulary
    controls = {i for i, kind in enumerate(vocabulary.kinds) if kind & CONTROL}
    assert {i for i in controls if draft_model.is_eog(i)} <= vocabulary.required <= controls
    prompt = draft_model.chat_prompt([Message("user", "hello")]).tolist()
    assert controls & set(prompt) <= vocabulary.required


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.chat_template"])
def test_a_tokenizer_is_another_where_any_of_it_differs(
    draft_path: Path, verifier_model: Model, draft_model: Model, tmp_path: Path, key: str
) -> None:
    changed, data = tmp_path / "changed.gguf", bytearray(draft_path.read_bytes())
    at = check_gguf(draft_path).value_offsets[key]
    if key == "tokenizer.chat_template":
        data[at + 8] ^= 1
    elif key == "tokenizer.ggml.tokens":
        last = data.index(b"tokenizer.ggml.token_type") - 9  # of the last token's text
        data[last] ^= 1
    else:
        data[at + 12 + 4 * 2000] = 4  # user-defined
    changed.write_bytes(data)
    assert draft_model.has_tokenizer_of(verifier_model)
    with Model.load(changed, faults=()) as other:
        assert not other.has_tokenizer_of(verifier_model)


# --- tokenizers -------------------------------------------------------------------------------------------------------


SHAPE = Shape("llama", 400, 1, 32, 2, 1, 64, 512)

ModelOf = Callable[[str], Model]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelOf]:
    """The vocabulary of a small model with the named pre-tokenizer."""
    folder = tmp_path_factory.mktemp("pre")
    with ExitStack() as opened:

        @cache
        def load(pre: str) -> Model:
            path = folder / f"{pre}.gguf"
            write(path, SHAPE, "F32", pre_tokenizer=pre)
            return opened.enter_context(Model.load(path, TEXT_ONLY))

        yield load


TEXT = "I'LL don't 1234567 x=3; 中文，好。日本語 é 🙂 \u0301 <|im ...-\u00a0\r\n \t" + "".join(MARKS)


def test_a_text_has_the_same_ids_in_any_thread_or_process(model_of: ModelOf) -> None:
    for pre in ("tekken", "gpt-2"):
        model = model_of(pre)
        for times in (1, DEPTH // len(TEXT) + 1, LONG // len(TEXT) + 1):
            whole = tokenized(model._vocab, (times * TEXT).encode(), True)  # in one call
            assert model.tokenize(times * TEXT, special=True).tolist() == whole.tolist()


@pytest.mark.parametrize("pre", ["tekken", "deepseek-v3", "viking", "exaone-moe"])
def test_a_long_stretch_of_one_kind_is_tokenised(model_of: ModelOf, pre: str) -> None:
    """Here 30,000 characters overflow a usual stack. Two letters are one token of this vocabulary."""
    for n in (30_000, 60_000):
        assert len(model_of(pre).tokenize("ee " + "e" * n)) > n // 4


def test_a_text_that_takes_the_tokenizer_down_is_refused(model_of: ModelOf) -> None:
    with pytest.raises(TextRefused, match="fails on it"):
        model_of("tekken").tokenize("-" * 2**21)
    with pytest.raises(TextRefused, match="fails on it"):
        model_of("whitespace").tokenize("two   words")  # an assertion of llama.cpp's
    assert len(model_of("tekken").tokenize("e" * LONG)) > LONG // 4


def test_what_takes_too_long_is_ended(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("exaone-moe")
    model.tokenize("one two " * LONG)
    monkeypatch.setattr("edgellm.engine.vocabulary.SECONDS", 0.0)
    monkeypatch.setattr("edgellm.engine.vocabulary.BYTES_A_SECOND", 2**60)
    with pytest.raises(TextRefused, match="of the processor"):
        model.tokenize("\r\n" * 2**20)


@pytest.mark.parametrize("name", TEXTS)
def test_what_cannot_fit_is_refused_untokenised(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, text = model_of("tekken"), TEXTS[name](2**22)
    monkeypatch.setattr(model, "_long_texts", None)
    with pytest.raises(PromptTooLong, match="at least"):
        model.tokenize(text, special=True, most=1023)


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_refused_for_its_length_that_fits(f32_pair: tuple[Path, Path], name: str) -> None:
    text = TEXTS[name](6_000)
    with Model.load(f32_pair[0], TEXT_ONLY) as model:
        ids = model.tokenize(text, special=True)
        assert model.tokenize(text, special=True, most=len(ids)).tolist() == ids.tolist()
        model.check_length(text, len(ids))


# --- the text side of a model -----------------------------------------------------------------------------------------


def test_a_model_without_a_name_has_its_files(tmp_path: Path, make_model: MakeModel) -> None:
    assert make_model().name == "random model-0"
    data = make_model().path.read_bytes().replace(b"general.name", b"general.nome")
    (tmp_path / "other.gguf").write_bytes(data)
    with Model.load(tmp_path / "other.gguf") as model:
        assert model.name == "other"


def test_control_tokens_are_parsed_on_demand(draft_model: Model) -> None:
    hidden = [token for token in range(draft_model.n_vocab) if draft_model.piece(token) == b""]
    for token in hidden:
        name = draft_model.vocabulary.pieces[token].decode()
        assert draft_model.tokenize(f"a{name}b", special=True).tolist().count(token) == 1
        assert draft_model.detokenize([token]) == b""


def test_a_lone_surrogate_does_not_stop_it(draft_model: Model) -> None:
    assert draft_model.detokenize(draft_model.tokenize("a\ud800b")) == b"a?b"
    assert draft_model.tokenize("").shape == (0,)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_there_is_no_such_token(draft_model: Model, token: int) -> None:
    with pytest.raises(InvalidOption, match=f"{token} is not a token"):
        draft_model.piece(token)


def test_llama_cpps_reason_is_told_and_nothing_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(file([string(b"general.architecture", b"klingon")]))
    with pytest.raises(ModelUnsupported, match="unknown model architecture: 'klingon'"):
        Model.load(path)
    path.write_bytes(file())
    with pytest.raises(ModelUnsupported, match="key not found"):
        Model.load(path)
    assert capfd.readouterr() == ("", "")


def test_an_encoder_is_refused(draft_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.lib, "llama_model_has_encoder", lambda _: True)
    with pytest.raises(ModelUnsupported, match="encoder"):
        Model.load(draft_path)


def test_a_closed_model_says_so(make_model: MakeModel) -> None:
    with make_model() as model:
        model.piece(1)
    for call in (
        lambda: model.tokenize("a"),
        lambda: model.piece(2),
        lambda: model.is_eog(1),
        lambda: model.vocabulary,
        lambda: model.owned,
    ):
        with pytest.raises(EngineFailed, match="is closed"):
            call()


def test_a_model_that_is_loaded_for_its_text_alone(verifier_path: Path, verifier_model: Model) -> None:
    text = "The red mug is on the shelf."
    with Model.load(verifier_path, TEXT_ONLY) as model:
        assert model.tokenize(text).tolist() == verifier_model.tokenize(text).tolist()
        assert model.vocabulary == verifier_model.vocabulary
        messages = [Message("user", text)]
        assert model.chat_prompt(messages).tolist() == verifier_model.chat_prompt(messages).tolist()
        with pytest.raises(InvalidOption, match=r"Only the vocabulary of .* is loaded"):
            Context(model, ContextSpec(n_ctx=16))
