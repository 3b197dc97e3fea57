"""No text kills the process or holds it up, and the ids of every text are llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from edgellm.engine import Model
from edgellm.engine.chat.tokenizing import DEPTH, LONG, tokenized
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import PromptTooLong, Stopped, TextRefused
from testkit.gguf.random_model import CONTROL, Shape, write
from testkit.hostile.inputs import TEXTS

SHAPE = Shape("llama", 400, 1, 32, 2, 1, 64, 512)

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


TEXT = "I'LL don't 1234567 x=3; 中文，好。日本語 é 🙂 \u0301 <|im ...-\u00a0\r\n \t" + "".join(CONTROL)


def test_a_text_has_the_same_ids_in_any_thread_or_process(model_of: ModelOf) -> None:
    for pre in ("tekken", "gpt-2"):
        model = model_of(pre)
        for times in (1, DEPTH // len(TEXT) + 1, LONG // len(TEXT) + 1):
            assert model.tokenize(times * TEXT, special=True).tolist() == whole(model, times * TEXT, special=True)


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


def test_the_process_is_kept_and_a_new_one_takes_its_place(model_of: ModelOf) -> None:
    model, text = model_of("tekken"), "one two " * LONG
    wanted, child = whole(model, text, False), model._tokenizer._child
    assert model.tokenize(text).tolist() == wanted
    before = child.pid
    assert model.tokenize(text).tolist() == wanted
    assert child.pid == before
    child.kill()
    while child.alive:
        pass
    assert model.tokenize(text).tolist() == wanted


def test_what_takes_too_long_is_ended(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("exaone-moe")
    model.tokenize("one two " * LONG)
    monkeypatch.setattr("edgellm.engine.chat.tokenizing.SECONDS", 0.0)
    monkeypatch.setattr("edgellm.engine.chat.tokenizing.BYTES_A_SECOND", 2**60)
    with pytest.raises(TextRefused, match="of the processor"):
        model.tokenize("\r\n" * 2**20)


def test_who_has_given_up_is_heard(model_of: ModelOf) -> None:
    looked = iter(range(4))
    with pytest.raises(Stopped):
        model_of("tekken").tokenize("\n" * 2**22, should_stop=lambda: next(looked, None) is None)


@pytest.mark.parametrize("name", TEXTS)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, text = model_of("tekken"), TEXTS[name](2**22)
    monkeypatch.setattr(model._tokenizer, "_child", None)
    with pytest.raises(PromptTooLong, match="at least"):
        model.tokenize(text, special=True, most=1023)


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_refused_for_its_length_that_fits(f32_pair: tuple[Path, Path], name: str) -> None:
    text = TEXTS[name](6_000)
    with Model.load(f32_pair[0], TEXT_ONLY) as model:
        ids = model.tokenize(text, special=True)
        assert model.tokenize(text, special=True, most=len(ids)).tolist() == ids.tolist()
        model._tokenizer.check_length(text, len(ids))
