"""A profile reads each prompt once, leaves no files behind, and continues where it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import Context, Message, Model
from edgellm.errors import ProfileStopped
from edgellm.llm import LLM
from edgellm.llm.pair_stats import forget, kept
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.profiler import PairProfiler
from edgellm.spec.verifier import Session
from tests.llm.conftest import PROFILED, prompts

MOST = 24
FEW = prompts(PROFILED, 1)[::2]


@pytest.fixture
def pair(f32_pair: tuple[Path, Path], home: Path) -> Iterator[LLM]:
    with LLM.open(*f32_pair, threads=1) as opened:
        yield opened


def figures(profile: Profile) -> dict[str, Any]:
    """Return what does not depend on the time of day."""
    found = {name: getattr(profile, name) for name in Profile.__slots__ if "seconds" not in name and name != "exits"}
    return {name: repr(value) for name, value in found.items()}


def interrupt(pair: LLM, after: int, **options: Any) -> ProfileStopped:
    """Begin a profile, and press Ctrl-C when `after` prompts are done."""

    def reached(done: int, _total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(ProfileStopped) as stopped:
        pair.profile(FEW, max_tokens=MOST, progress=reached, **options)
    return stopped.value


def test_an_interrupted_profile_continues_and_is_the_same(
    pair: LLM, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pair.profile(FEW, max_tokens=MOST)
    assert whole.exits == ()  # early exits are measured only where they are asked for
    assert not (home / "cache" / "shards").exists()
    assert not list((home / "data" / "profiles").glob("*"))  # while it was slow, its progress was saved
    stopped = interrupt(pair, 3)
    assert (stopped.done, stopped.kept) == (3, True)
    (file,) = (home / "data" / "profiles").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    recorded: list[int] = []
    record = PairProfiler.record

    def noted(self: PairProfiler, *arguments: Any) -> Any:
        recorded.append(1)
        return record(self, *arguments)

    monkeypatch.setattr(PairProfiler, "record", noted)
    continued = pair.profile(FEW, max_tokens=MOST)
    assert len(recorded) == len(FEW) - 3
    assert figures(continued) == figures(whole)
    assert not file.exists()


def test_progress_of_other_prompts_or_options_is_not_used(pair: LLM, home: Path) -> None:
    interrupt(pair, 2)
    assert interrupt(pair, 1, gamma=3).done == 1
    (file,) = (home / "data" / "profiles").iterdir()
    assert len(file.read_text().splitlines()) == 2  # the terms and one prompt
    file.write_text("{}\nnonsense")
    assert interrupt(pair, 0).done == 0


def test_progress_has_no_words_in_it_and_is_forgotten_with_the_history(pair: LLM, home: Path) -> None:
    interrupt(pair, 2)
    (file,) = (home / "data" / "profiles").iterdir()
    strings = {value for line in file.read_text().splitlines() for value in _strings(json.loads(line))}
    assert all(len(value) == 64 for value in strings)  # hashes
    assert kept().profiles == 1
    forget()
    assert not file.exists()


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def test_without_a_history_nothing_is_kept_of_an_interrupted_profile(f32_pair: tuple[Path, Path], home: Path) -> None:
    with LLM.open(*f32_pair, threads=1, history=False) as pair:
        assert not interrupt(pair, 2).kept
    assert not (home / "data" / "profiles").exists()


def test_early_exit_leaves_at_most_the_files_of_the_chosen_layer(pair: LLM, home: Path) -> None:
    found = pair.profile(FEW, max_tokens=MOST, early_exit=True)
    assert found.exits
    folder = home / "cache" / "shards"
    assert len(list(folder.iterdir())) == (0 if found.best_exit()[0] is None else 2)


def test_a_profile_of_long_prompts_has_few_positions_besides_those_of_a_chat(
    f32_pair: tuple[Path, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in positions times layers of all contexts that are open at once: so many keys and values are kept."""
    opened: dict[int, int] = {}
    most = [0]
    init, close = Context.__init__, Context.close

    def noted(self: Context, model: Model, *spec: Any, **options: Any) -> None:
        init(self, model, *spec, **options)
        opened[id(self)] = self.n_ctx * model.n_layer
        most[0] = max(most[0], sum(opened.values()))

    def closed(self: Context) -> None:
        close(self)
        opened.pop(id(self), None)

    monkeypatch.setattr(Context, "__init__", noted)
    monkeypatch.setattr(Context, "close", closed)
    for module in ("llm.early_exit", "spec.drafters.parallel"):
        monkeypatch.setattr(f"edgellm.{module}.MOST_READ", 96)
    long = "- The mug is on the shelf in the hall.\n" * 60 + "\nWhere is the mug?"
    with LLM.open(*f32_pair, threads=1, n_ctx=1024) as pair:
        list(pair.reply(long, max_tokens=2, retrieval="off"))
        chat, most[0] = most[0], 0
        found = pair.profile([[Message("user", long)], *FEW], max_tokens=MOST, early_exit=True)
    assert found.exits
    assert most[0] <= 1.2 * chat


def test_a_prompt_is_verified_as_often_as_its_own_reply_and_the_drafted_one(
    pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each verification is one of a chunk that the profile has, except for replies that context lookup changes."""
    asked: list[int] = []
    submit = Session.submit

    def noted(self: Session, *arguments: Any, **options: Any) -> Any:
        asked.append(1)
        return submit(self, *arguments, **options)

    monkeypatch.setattr(Session, "submit", noted)
    found = pair.profile(FEW, max_tokens=MOST, context_lookup=False)
    assert len(asked) <= 3 * found.chunks


@pytest.mark.usefixtures("home")
def test_replies_make_a_profile_and_improve_it_where_the_user_allows_it(
    f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.llm.pair_stats.LEARNED", 128)
    asked = prompts(PROFILED, 4)
    sizes: list[int] = []
    for part in (asked[: len(asked) // 2], asked[len(asked) // 2 :]):  # two processes
        with LLM.open(*f32_pair, threads=1) as pair:
            for number, prompt in enumerate(part):
                written = [token.id for token in pair.reply(prompt, max_tokens=40, learn_profile=True)]
                assert number % 6 or written == [token.id for token in pair.reply(prompt, max_tokens=40)]
                profile = pair.engine.knowledge.profile(True) if pair.engine.knowledge is not None else None
                sizes.append(0 if profile is None else profile.chunks)
    made = sorted(set(sizes))
    assert made[0] == 0
    assert made[1] >= 64
    assert all(more >= 2 * less for less, more in pairwise(made[1:]))
    assert made[-1] >= 128
    assert len(made) <= 3  # enough after 128


def test_replies_leave_a_profile_alone_by_default(pair: LLM, home: Path) -> None:
    for prompt in FEW[:3]:
        list(pair.reply(prompt, max_tokens=40))
    assert not (home / "data" / "profiles").exists()
