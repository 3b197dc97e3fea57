"""No text kills the process or holds it up, and the ids of every text are llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine import Model
from edgellm.engine.chat.tokenizing import DEPTH, TokenizerProcesses, slices, tokenized
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import PromptTooLong, Stopped, TextRefused
from testkit.gguf.random_model import CONTROL, Shape, write
from testkit.hostile.inputs import PRE_TOKENIZERS, TEXTS

SHAPE = Shape("llama", 400, 1, 32, 2, 1, 64, 512)
LONG = 60_000  # characters: twice what overflows a stack of 8 MiB

ModelOf = Callable[[str], Model]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelOf]:
    """The vocabulary of a small model with the named pre-tokenizer."""
    folder, opened = tmp_path_factory.mktemp("pre"), []

    @cache
    def load(pre: str) -> Model:
        path = folder / f"{pre}.gguf"
        write(path, SHAPE, "F32", pre_tokenizer=pre)
        opened.append(Model.load(path, TEXT_ONLY))
        return opened[-1]

    yield load
    for model in opened:
        model.close()


def whole(model: Model, text: str, special: bool) -> list[int]:
    """What llama.cpp makes of the text in one call."""
    return tokenized(model._vocab, text.encode(), special).tolist()


def in_slices(model: Model, text: str, special: bool) -> list[int]:
    """The same, cut wherever it may be."""
    pattern, found, start = model._tokenizer._safe_place, [], 0
    places = [match.start() for match in pattern.finditer(text)] if pattern else []
    for end in [*places, len(text)]:
        found += whole(model, text[start:end], special)
        start = end
    return found


WORDS = st.sampled_from(
    [
        "the",
        "I'LL",
        "don't",
        "1234567",
        "x=3;",
        "中文，好。",
        "日本語",
        "é",
        "🙂",
        "\u0301",
        *CONTROL,
        "<|im",
        "...",
        "-",
    ]
)
GAPS = st.sampled_from([" ", " ", "\n", "  ", "\r\n", "\t", "", "\u00a0", " \n "])


@settings(max_examples=25)
@given(st.lists(st.tuples(WORDS, GAPS), max_size=40).map(lambda pairs: "".join(map("".join, pairs))), st.booleans())
def test_a_text_in_slices_has_the_ids_of_the_whole_text(model_of: ModelOf, text: str, special: bool) -> None:
    for pre in PRE_TOKENIZERS:
        if pre != "whitespace":
            model = model_of(pre)
            assert in_slices(model, text, special) == whole(model, text, special), pre


def test_a_bundled_text_in_slices_has_the_ids_of_the_whole_text(f32_pair: tuple[Path, Path]) -> None:
    text = "The red mug is on the shelf.\n\nWhere is it?<|end|><|user|>Is it blue? " * 500
    with Model.load(f32_pair[0], TEXT_ONLY) as model:
        for special in (True, False):
            assert model.tokenize(text, special=special).tolist() == whole(model, text, special)


@pytest.mark.parametrize("pre", ["tekken", "deepseek-v3", "viking", "exaone-moe"])
def test_a_long_stretch_of_one_kind_is_tokenised(model_of: ModelOf, pre: str) -> None:
    """In this process it overflows the stack. Two letters are one token of this vocabulary."""
    assert len(model_of(pre).tokenize("ee " + "e" * LONG)) > LONG // 4


def test_a_text_that_takes_the_tokenizer_down_is_refused(model_of: ModelOf) -> None:
    with pytest.raises(TextRefused, match="fails on it"):
        model_of("tekken").tokenize("-" * 2**21)
    with pytest.raises(TextRefused, match="fails on it"):
        model_of("whitespace").tokenize("two   words")  # an assertion of llama.cpp's
    assert len(model_of("tekken").tokenize("e" * LONG)) > LONG // 4


def test_the_process_is_kept_and_a_new_one_takes_its_place(model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of("tekken")
    processes = TokenizerProcesses(model.path, model.n_vocab)
    wanted = processes.tokenize(b"one two", False, lambda: False).tolist()
    kept = processes._kept
    assert kept is not None
    assert processes.tokenize(b"one two", False, lambda: False).tolist() == wanted
    assert processes._kept is kept
    kept.kill()
    while kept.alive:
        pass
    assert processes.tokenize(b"one two", False, lambda: False).tolist() == wanted == whole(model, "one two", False)
    processes.close()
    processes.close()


def test_what_takes_too_long_is_ended(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("exaone-moe")
    process = TokenizerProcesses(model.path, model.n_vocab)
    process.tokenize(b"one", False, lambda: False)
    monkeypatch.setattr("edgellm.engine.chat.tokenizing.SECONDS", 0.0)
    monkeypatch.setattr("edgellm.engine.chat.tokenizing.BYTES_A_SECOND", 2**60)
    with pytest.raises(TextRefused, match="of the processor"):
        process.tokenize(b"\r\n" * 2**20, False, lambda: False)
    process.close()


def test_who_has_given_up_is_heard(model_of: ModelOf) -> None:
    looked = 0

    def gone() -> bool:
        nonlocal looked
        looked += 1
        return looked > 3

    for pre in ("tekken", "gpt-2"):
        looked = 0
        with pytest.raises(Stopped):
            model_of(pre).tokenize("\n" * 2**22, should_stop=gone)
        looked = 0
        with pytest.raises(Stopped):
            model_of(pre).tokenize("one two three " * 10_000, should_stop=gone)


@pytest.mark.parametrize("name", TEXTS)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, text = model_of("tekken"), TEXTS[name](2**22)
    monkeypatch.setattr(model._tokenizer, "_encode_in_process", None)
    monkeypatch.setattr(model._tokenizer, "_processes", None)
    with pytest.raises(PromptTooLong, match="at least"):
        model.tokenize(text, special=True, most=1023)


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_refused_for_its_length_that_fits(f32_pair: tuple[Path, Path], name: str) -> None:
    text = TEXTS[name](6_000)
    with Model.load(f32_pair[0], TEXT_ONLY) as model:
        ids = model.tokenize(text, special=True)
        assert model.tokenize(text, special=True, most=len(ids)).tolist() == ids.tolist()
        model._tokenizer.check_length(text, len(ids))


def test_a_text_is_cut_into_slices_where_that_is_safe(model_of: ModelOf) -> None:
    """What cannot be cut goes elsewhere, in one piece: each costs a round trip."""
    words = model_of("gpt-2")._tokenizer._safe_place
    for text in ("two one " * 40_000, "one\n" + "-" * 40_000 + " two" * 40_000):
        parts = list(slices(text, words, DEPTH))
        assert "".join(part for part, _ in parts) == text
        assert {len(part) < 10_000 for part, bounded in parts if bounded} == {True}
        assert sum(not bounded for _, bounded in parts) == text.count("\n")
    assert list(slices(CONTROL[0] * 80_000, words, DEPTH)) == [(CONTROL[0] * 80_000, False)]
    assert len(model_of("gpt-2").tokenize(CONTROL[0] * 8_000, special=True)) == 8_000


def test_words_within_a_special_token_are_not_cut_at(model_of: ModelOf) -> None:
    for specials, cut in ((["<a>"], True), (["two one"], False), (None, False)):
        tokenizer = copy(model_of("gpt-2")._tokenizer)
        vars(tokenizer).pop("_safe_place", None)
        vars(tokenizer)["_specials"] = specials
        assert (tokenizer._safe_place is not None) is cut
    assert model_of("exaone-moe")._tokenizer._safe_place is None
