"""Profiles: made by command or from first replies, continued where they were interrupted, found by what the models are,
refused where they do not fit."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import Message
from edgellm.errors import InvalidOption, ProfileStopped, ProfileUnusable
from edgellm.llm import LLM, find_profile, profile_path, read_profile
from edgellm.llm.pair_stats import forget, kept
from edgellm.llm.profiling import PairProfiler
from edgellm.spec.gates.profile import Profile
from edgellm.spec.types import Notice
from edgellm.storage.fingerprint import fingerprint
from tests.cli.conftest import Edge, edge
from tests.spec.real import case, prompts, told
from tests.watching import calls_of

__all__ = ["edge"]

MOST = 24
FEW = prompts(1001)[::2]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Prompts as `edgellm profile` takes them."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"messages": [{"role": m.role, "content": m.content} for m in messages]} for messages in FEW]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def hashes(pair: tuple[Path, Path]) -> tuple[str, str]:
    return fingerprint(pair[0]), fingerprint(pair[1])


# --- the command ----------------------------------------------------------------------------------------------------


def test_profile_from_end_to_end(
    edge: Edge, home: Path, f32_pair: tuple[Path, Path], prompt_file: Path, address: str
) -> None:
    draft, verifier = map(str, f32_pair)
    made = edge("profile", "--draft", draft, "--verifier", address, "--prompts", str(prompt_file), "--max-tokens", "24")
    made.told("c_th", "alpha", "accepted up to token", "at a budget of 0.2")
    kept = profile_path(*hashes(f32_pair))  # by what the models are, wherever they are
    assert str(kept) in made.err.replace("\n", "")
    profile = Profile.load(kept)
    assert profile.terms.gamma == 2
    told = [profile.evidence[f"auc importance, layer {layer}"] for layer in range(8)]
    assert profile.terms.layers == (max(range(8), key=told.__getitem__),)
    assert 0.0 <= profile.evidence["gate worth at 0.2"] <= 1.0
    chat = ("chat", "Where is my mug?", "--budget", "0.2", "--explain", "--max-tokens", "8", "--draft", draft)
    for other in (verifier, address):
        edge(*chat, "--verifier", other).told("of the profiled replies equal the verifier's")


def test_profile_as_json(
    edge: Edge, home: Path, f32_pair: tuple[Path, Path], prompt_file: Path, tmp_path: Path
) -> None:
    pair = ("--draft", str(f32_pair[0]), "--verifier", str(f32_pair[1]))
    output = str(tmp_path / "deep" / "mine.json")
    words = ("--prompts", str(prompt_file), "--max-tokens", "16", "--layer", "2", "--json", "--output", output)
    made = edge("profile", *pair, *words).told()
    assert [line for line in made.err.splitlines() if not line.startswith("profiling ")] == []
    assert (made.answer["path"], made.answer["layers"]) == (output, [2])
    assert not profile_path(*hashes(f32_pair)).exists()
    chat = ("chat", "Hello", "--budget", "0.2", "--max-tokens", "4", "--profile", output)
    edge(*chat, *pair).told()
    edge(*chat).told("another draft model", "edgellm profile", code=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no prompts"), ('Hello\n{"messages": 3}', "Line 2"), ('{"role": "user"}', "Line 1"), ("[1]", "Line 1"),
        ("{", "Line 1"), ("Hello?", "more prompts"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_used(edge: Edge, home: Path, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.txt"
    path.write_text(text)
    assert edge("profile", "--prompts", str(path), "--max-tokens", "2").told(says, code=2).out == ""
    edge("profile", "--prompts", str(tmp_path / "none")).told(code=2)


def test_the_forms_of_a_prompt(tmp_path: Path) -> None:
    from edgellm.cli.commands.profile import read_prompts

    path = tmp_path / "p.txt"
    path.write_text('A line\n\n{"prompt": "p"}\n"quoted"\n[{"role": "user", "content": "c"}]\n', encoding="utf-8")
    assert read_prompts(path) == ["A line", "p", "quoted", [Message("user", "c")]]


# --- a pair without one ---------------------------------------------------------------------------------------------


def test_a_pair_without_a_profile_makes_one_of_its_first_replies(
    home: Path, f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = 40
    monkeypatch.setattr("edgellm.llm.profiling._ENOUGH", enough)
    asked = iter(prompts(2002, 6))
    news: list[Notice] = []
    processes = 0
    while find_profile(*hashes(f32_pair)) is None:
        processes += 1
        with LLM.open(*f32_pair, threads=1) as pair:  # as one process after the other
            for _ in range(2):
                reply = pair.reply(next(asked), max_tokens=24, budget=0.2)
                reply.listen(on_notice=news.append)
                list(reply)
                if find_profile(*hashes(f32_pair)) is None:
                    assert reply.summary.chunks_verified == reply.summary.rounds
                    assert not reply.summary.share_offloaded
    assert processes > 1
    assert "no profile yet" in news[0].text
    assert "has a profile now" in news[-1].text
    assert sum("no profile yet" in notice.text for notice in news) == processes
    profile = find_profile(*hashes(f32_pair))
    assert profile is not None
    assert profile.terms.origin == "first replies"
    assert profile.terms.chunks >= enough
    assert not list((home / "data" / "profiles").glob("*.first.json"))
    with LLM.open(*f32_pair, threads=1) as pair:
        assert "of the profiled replies" in told(pair.reply(case(1), max_tokens=24, budget=0.2))[0]


def test_a_place_that_cannot_be_written_does_not_stop_a_reply(
    f32_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "file"))
    with LLM.open(*f32_pair, threads=1) as pair:
        assert "cannot be saved" in told(pair.reply(case(1), max_tokens=12, budget=0.2))[-1]


def test_of_a_reply_without_drafts_there_is_nothing_to_save(pair: LLM) -> None:
    """As where the verifier is away from the start."""
    assert pair.engine.knowledge is not None
    first = pair.engine.knowledge.first
    assert first.end(first.begin(())[0], 4, ()) is None


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_profile_of_other_models_is_refused(f32_pair: tuple[Path, Path], profile_path: Path) -> None:
    draft, verifier = f32_pair
    for pair, what in (((verifier, verifier), "draft model"), ((draft, draft), "verifier")):
        with pytest.raises(ProfileUnusable, match=f"of another {what} .*edgellm profile"):
            LLM.open(*pair, profile=profile_path)
    assert read_profile(profile_path, *hashes(f32_pair)).terms.origin == "prompts"


def test_a_profile_of_another_version_is_refused(home: Path, f32_pair: tuple[Path, Path], profile_path: Path) -> None:
    from edgellm.llm import profile_path as place

    own = place(*hashes(f32_pair))
    own.parent.mkdir(parents=True)
    own.write_text(profile_path.read_text().replace('"version": 10', '"version": 1'))
    with LLM.open(*f32_pair, threads=1) as pair:
        with pytest.raises(ProfileUnusable, match="a new one with edgellm profile"):
            list(pair.reply("Hello", budget=0.2, max_tokens=4))
        assert list(pair.reply("Hello", max_tokens=4))  # who gives no budget needs none


def test_a_verifier_that_does_not_say_which_model_it_is(f32_pair: tuple[Path, Path], address: str) -> None:
    with LLM.open(f32_pair[0], address, threads=1) as pair:
        known = pair.engine.knowledge
        assert known is not None
        known._verifier = lambda: ""
        with pytest.raises(ProfileUnusable, match="does not report its model"):
            list(pair.reply("Hello", budget=0.2, max_tokens=4))
        assert list(pair.reply("Hello", budget=0.2, gate="random", max_tokens=4))


def test_the_bundled_pair_comes_with_its_profile(home: Path, draft_path: Path, verifier_path: Path) -> None:
    profile = find_profile(*hashes((draft_path, verifier_path)))
    assert profile is not None, "the pair is another than the profiled one; run: python -m models.profile"
    assert profile.terms.prompts >= 100


def test_half_a_pair_cannot_be_profiled(f32_pair: tuple[Path, Path]) -> None:
    with LLM.open(f32_pair[0], None, threads=1) as small:
        with pytest.raises(InvalidOption, match="both a draft model and a verifier"):
            small.profile(["Hello"])
        assert list(small.reply("Hello", max_tokens=4))


def test_replies_at_the_same_time_make_one_profile(
    home: Path, f32_pair: tuple[Path, Path], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.llm.profiling._ENOUGH", 8)
    news: list[Notice] = []
    with LLM.open(f32_pair[0], address, threads=1) as pair:
        replies = [pair.reply(messages, max_tokens=24, budget=0.2) for messages in prompts(2002)]
        for reply in replies:
            reply.listen(on_notice=news.append)
            next(reply)
        for reply in replies:
            list(reply)
            assert reply.summary.guesses_tried == 0  # of what is drafted ahead no importance would be known
    assert [("no profile yet" in notice.text, "has a profile now" in notice.text) for notice in news] == [
        (True, False),
        (False, True),
    ]


# --- the run of a profile -------------------------------------------------------------------------------------------


@pytest.fixture
def pair(f32_pair: tuple[Path, Path], home: Path) -> Iterator[LLM]:
    with LLM.open(*f32_pair, threads=1) as opened:
        yield opened


def figures(profile: Profile) -> dict[str, Any]:
    """Return what does not depend on the time of day."""
    return {name: repr(getattr(profile, name)) for name in Profile.__slots__ if "seconds" not in name}


def interrupt(pair: LLM, after: int, **options: Any) -> ProfileStopped:
    """Begin a profile, and press Ctrl-C when `after` prompts are done."""

    def reached(done: int, _total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(ProfileStopped) as stopped:
        pair.profile(FEW, max_tokens=MOST, progress=reached, **options)
    return stopped.value


def test_an_interrupted_profile_goes_on_and_is_the_same(pair: LLM, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pair.profile(FEW, max_tokens=MOST)
    assert not list((home / "data" / "profiles").glob("*"))  # while it was slow, its progress was saved
    stopped = interrupt(pair, 3)
    assert "after 3 of" in stopped.what
    assert "to continue" in stopped.next_step
    (file,) = (home / "data" / "profiles").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    recorded = calls_of(monkeypatch, PairProfiler, "record")
    continued = pair.profile(FEW, max_tokens=MOST)
    assert len(recorded) == len(FEW) - 3
    assert figures(continued) == figures(whole)
    assert not file.exists()


def test_progress_of_other_prompts_or_options_is_not_used(pair: LLM, home: Path) -> None:
    interrupt(pair, 2)
    assert "after 1 of" in interrupt(pair, 1, gamma=3).what
    (file,) = (home / "data" / "profiles").iterdir()
    assert len(json.loads(file.read_text())) == 2  # the terms and one prompt
    file.write_text("[{}, nonsense")
    assert "after 0 of" in interrupt(pair, 0).what


def test_progress_has_no_words_in_it_and_is_forgotten_with_the_history(pair: LLM, home: Path) -> None:
    interrupt(pair, 2)
    (file,) = (home / "data" / "profiles").iterdir()
    terms, *runs = json.loads(file.read_text())
    assert len(terms) == 64  # a hash
    assert '"' not in re.sub(r'"\w+": ', "", json.dumps(runs))
    assert kept().profiles == 1
    forget()
    assert not file.exists()


def test_without_a_history_nothing_is_kept_of_an_interrupted_profile(f32_pair: tuple[Path, Path], home: Path) -> None:
    with LLM.open(*f32_pair, threads=1, history=False) as pair:
        assert "Nothing is kept" in interrupt(pair, 2).next_step
    assert not (home / "data" / "profiles").exists()


def test_replies_leave_a_profile_alone_by_default(pair: LLM, home: Path) -> None:
    for prompt in FEW[:3]:
        list(pair.reply(prompt, max_tokens=40))
    assert not (home / "data" / "profiles").exists()


def test_a_profile_of_fewer_chunks_does_not_replace_the_pairs(pair: LLM) -> None:
    small = pair.profile(FEW, max_tokens=MOST)
    path = pair.keep_profile(replace(small, terms=replace(small.terms, chunks=small.terms.chunks + 1)))
    before = path.read_bytes()
    with pytest.raises(InvalidOption, match=f"is not replaced by this one of {small.terms.chunks}"):
        pair.keep_profile(small)
    assert path.read_bytes() == before
