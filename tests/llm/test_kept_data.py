"""Everything that comes from prompts is forgotten when the user says so, and when it is too old."""

import errno
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edgellm.engine.kv.saved_prompts import prompts_folder
from edgellm.errors import HistoryUnusable
from edgellm.llm import LLM, profile_path
from edgellm.llm.pair_stats import LOGS_MOST, KeptData, expire, forget, keep_profile, kept, tidy
from edgellm.spec.gates.profile import Profile
from edgellm.state import write_state
from edgellm.storage.chat_log import Conversation, History, set_max_age
from edgellm.storage.fingerprint import fingerprint
from edgellm.system import cache_dir, data_dir, state_dir

MODELS = Path(__file__).parents[2] / "models"
SECRET = "my PIN is 4711"
ALL = KeptData(conversations=1, profiles=2, curves=1, logs=1, prompts=1)


@pytest.fixture(autouse=True)
def _home(home: Path) -> None:
    """Each test has a home of its own."""


@pytest.fixture
def profile() -> Profile:
    return Profile.load(MODELS / "profile.json")


@pytest.fixture
def _everything(profile: Profile) -> None:
    """One of each kind, all with the secret in it."""
    History().save(Conversation.new().with_turns([("user", SECRET)]))
    folder = data_dir() / "profiles"
    profile.save(folder / "prompts.json")
    replace(profile, terms=replace(profile.terms, origin="first replies")).save(folder / "replies.json")
    write_state(folder / "pair.first.json", SECRET)
    write_state(cache_dir() / "curves" / "curve.json", SECRET)
    write_state(state_dir() / "logs" / "crash-1.log", SECRET)
    write_state(prompts_folder() / "model-hash.kv", SECRET)


def found(text: str) -> list[str]:
    root = Path(os.environ["EDGELLM_HOME"])
    return [str(path) for path in root.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.usefixtures("_everything")
@pytest.mark.parametrize("damaged", [False, True])
def test_forgetting_counts_what_it_removes_and_leaves_nothing(damaged: bool) -> None:
    if damaged:
        [path] = History().path.iterdir()
        path.write_text(SECRET)
    assert kept() == ALL
    assert forget() == ALL
    assert found(SECRET) == []
    assert kept() == forget() == KeptData()
    assert str(ALL) == "1 conversation, 2 profiles, 1 cost curve, 1 crash log, 1 saved prompt"
    assert [path.name for path in (data_dir() / "profiles").iterdir()] == ["prompts.json"]


@pytest.mark.usefixtures("_everything")
def test_what_cannot_be_removed_is_told_and_the_rest_goes() -> None:
    path = History().path
    shutil.rmtree(path)
    path.touch()
    with pytest.raises(HistoryUnusable, match=r"cannot be removed: Not a directory\. Check its permissions"):
        forget()
    assert found(SECRET) == []


@pytest.mark.usefixtures("_everything")
def test_everything_can_be_forgotten_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("edgellm.storage.chat_log.write_state", full)
    monkeypatch.setattr("edgellm.storage.chat_log.hold_lock", full)
    forget()
    assert found(SECRET) == []


@pytest.mark.usefixtures("_everything")
@pytest.mark.parametrize("on", [True, False])
def test_what_is_too_old_goes_and_the_rest_stays(on: bool) -> None:
    if not on:
        History().turn_off()
    expire()
    assert kept() == ALL
    long_ago = datetime.now(UTC) - timedelta(days=400)
    for path in Path(os.environ["EDGELLM_HOME"]).rglob("*"):
        os.utime(path, (long_ago.timestamp(),) * 2, follow_symlinks=False)
    set_max_age(None)
    expire()
    assert kept() == ALL
    set_max_age(timedelta(days=365))
    expire()
    assert kept() == KeptData()
    assert found(SECRET) == []


def test_an_old_conversation_goes_when_another_one_is_kept() -> None:
    History().save(replace(Conversation.new().with_turns([("user", SECRET)]), when=datetime(2019, 1, 1, tzinfo=UTC)))
    assert found(SECRET) == []
    History().save(Conversation.new().with_turns([("user", "new")]))
    assert len(History().all()) == 1


@pytest.mark.usefixtures("_everything")
def test_what_was_open_to_others_is_closed_before_anything_else() -> None:
    for folder in (data_dir(), state_dir()):
        folder.chmod(0o777)
    tidy()
    assert not [folder for folder in (data_dir(), state_dir()) if folder.stat().st_mode & 0o077]


def test_crash_logs_are_few() -> None:
    for number in range(LOGS_MOST + 5):
        write_state(state_dir() / "logs" / f"crash-{number:03}.log", "x")
    expire()
    assert len(list((state_dir() / "logs").iterdir())) == LOGS_MOST


def test_a_damaged_profile_is_set_aside_when_a_new_one_is_kept(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("damaged")
    keep_profile(profile, path)
    assert Profile.load(path) == profile
    assert (tmp_path / "profile.json.aside").read_text() == "damaged"
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("history", "keeps"), [("on", True), ("off", False), ("none", False)])
def test_first_replies_are_kept_only_with_the_history(history: str, keeps: bool) -> None:
    if history == "off":
        History().turn_off()
    with LLM.open(MODELS / "draft.gguf", MODELS / "draft.gguf", history=history != "none", threads=1) as pair:
        list(pair.reply("Where is my mug?", budget=0.5, max_tokens=8, retrieval="off"))
    path = profile_path(*[fingerprint(MODELS / "draft.gguf")] * 2)
    assert path.with_name(f"{path.stem}.first.json").exists() == keeps
