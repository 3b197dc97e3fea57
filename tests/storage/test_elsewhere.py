"""Models elsewhere: those of Ollama and LM Studio, in a folder of the user, and files that were given a name."""

import json
import shutil
from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.errors import EdgeError, InvalidOption, ModelNotFound
from edgellm.storage.fingerprint import FileHash, fingerprint
from edgellm.storage.hub.pull import plan
from edgellm.storage.model_files import FOLDERS, list_models, name_of, resolve
from edgellm.storage.upkeep import add, remove
from testkit.gguf.split_file import split

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def home(tmp_path: Path, draft_path: Path, verifier_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the bundled models as Ollama and LM Studio keep them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "edgellm"))
    monkeypatch.delenv(FOLDERS)
    ollama, studio = tmp_path / ".ollama" / "models", tmp_path / ".lmstudio" / "models" / "ann" / "tiny-GGUF"
    (ollama / "blobs").mkdir(parents=True)
    digest = fingerprint(draft_path)
    shutil.copy(draft_path, ollama / "blobs" / f"sha256-{digest}")
    weights = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    eyes = {"mediaType": "application/vnd.ollama.image.projector", "digest": f"sha256:{'0' * 64}"}
    for name, layers in (
        ("registry.ollama.ai/library/tiny/latest", [eyes, weights]),
        ("hf.co/ann/other-GGUF/Q8_0", [weights]),
        ("registry.ollama.ai/library/smollm2/135m", [weights]),
        ("registry.ollama.ai/library/tensors/1b", [eyes]),
        ("registry.ollama.ai/library/gone/1b", [{**weights, "digest": f"sha256:{'1' * 64}"}]),
        ("registry.ollama.ai/library/hostile/1b", [{**weights, "digest": "sha256:../../../secret"}]),
        ("registry.ollama.ai/library/hostile/2b", [{**weights, "digest": 7}]),
    ):
        manifest = ollama / "manifests" / name
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        manifest.chmod(0o644)
    studio.mkdir(parents=True)
    shutil.copy(verifier_path, studio / "tiny-Q8_0.gguf")
    split(draft_path, studio, 2)
    split(draft_path, studio.parent, 3).rename(studio / "half-00001-of-00003.gguf")
    (studio / "mmproj-F16.gguf").touch()
    return tmp_path


def test_other_programs_models_are_found_where_they_lie_and_only_read(home: Path, draft_path: Path) -> None:
    before = {path: (path.stat().st_mode, path.stat().st_mtime_ns) for path in home.rglob("*")}
    left_out = dict[str, str]()
    found = {model.name: model.origin for model in list_models(left_out) if model.origin != "bundled"}
    assert found == {
        "ann/other-GGUF:Q8_0": "Ollama", "ann/tiny-GGUF:draft": "LM Studio", "ann/tiny-GGUF:Q8_0": "LM Studio",
        "smollm2:135m": "Ollama", "tiny:latest": "Ollama",
    }  # fmt: skip
    assert left_out.items() >= {
        "mmproj-F16.gguf": "it belongs to a model, and is none", "gone:1b": "its file is missing",
        "half-00001-of-00003.gguf": "other parts of it are missing", "tensors:1b": "it is not in one GGUF file",
        "hostile:1b": "it is not in one GGUF file", "hostile:2b": "it is not in one GGUF file",
    }.items()  # fmt: skip
    path = resolve("tiny")
    assert path == resolve("Tiny:latest") == resolve("hf.co/ann/other-GGUF:Q8_0")
    assert FileHash(path).known == fingerprint(draft_path)
    assert len(ModelFile.open(resolve("ann/tiny-GGUF:draft")).paths) == 2
    assert name_of(resolve("ann/tiny-GGUF:Q8_0")) == "ann/tiny-GGUF:Q8_0"
    for name, origin in (("tiny", "Ollama"), ("ann/tiny-GGUF:Q8_0", "LM Studio"), ("smollm2:135m", "Ollama")):
        assert (plan(name).path, plan(name).reason) == (resolve(name), f"its source is {origin}, where it stays")
        with pytest.raises(InvalidOption, match=f"was not pulled by edgellm: it is .*, of {origin}"):
            remove(name)
    assert {path: (path.stat().st_mode, path.stat().st_mtime_ns) for path in before} == before


def test_the_variable_names_other_folders_or_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "moved"))
    (home / ".ollama" / "models").rename(home / "moved")
    assert resolve("tiny").is_relative_to(home / "moved")
    monkeypatch.setenv(FOLDERS, "")
    assert {model.origin for model in list_models()} == {"bundled"}
    monkeypatch.setenv(FOLDERS, str(home / "moved") + ":~/.lmstudio/models/ann/tiny-GGUF")
    assert [model.name for model in list_models() if model.origin.startswith("~")] == ["draft", "tiny-Q8_0"]
    assert resolve("tiny").is_relative_to(home / "moved")


def test_a_file_has_the_name_that_it_is_given_until_that_is_forgotten(home: Path, draft_path: Path) -> None:
    part = split(draft_path, home, 2)
    assert add(draft_path, "mine").path.resolve() == resolve("mine").resolve() == draft_path
    assert (add(part).name, name_of(part), resolve("draft").resolve()) == ("draft", "draft", part)
    assert len(add(part, "mine").paths) == 2, "a name may be given anew"
    for name in ("edgellm-draft", "tiny:latest", "auto", "../x", "x.gguf", ""):
        with pytest.raises(InvalidOption, match="Give another one"):
            add(draft_path, name)
    for path in (home / "none.gguf", home / ".lmstudio" / "models" / "ann" / "tiny-GGUF" / "half-00001-of-00003.gguf"):
        with pytest.raises(EdgeError):
            add(path, "other")
    with pytest.raises(InvalidOption, match="belongs to a model"):
        add(home / ".lmstudio" / "models" / "ann" / "tiny-GGUF" / "mmproj-F16.gguf")
    part.unlink()
    left_out = dict[str, str]()
    assert "mine" not in {model.name for model in list_models(left_out)}
    assert left_out["mine-00001-of-00002.gguf"] == "its file is missing"
    remove("mine")
    with pytest.raises(ModelNotFound):
        resolve("mine")
    assert ModelFile.open(draft_path).paths == (draft_path,)
