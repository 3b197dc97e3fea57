"""A chat template is a stranger's program: it gets the answers of the sandbox, and its limits."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import datetime
from zoneinfo import ZoneInfo

import psutil
import pytest
from jinja2 import nodes
from llama_cpp import llama_chat_format
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from edgellm.engine import Message, Model
from edgellm.engine.chat import template as chat_template
from edgellm.engine.chat.template import MOST_SOURCE, TemplateRenderer
from edgellm.engine.model import LoadSpec
from edgellm.errors import ModelUnsupported
from edgellm.isolation.child import ChildKind
from edgellm.isolation.template_sandbox import compile_template
from testkit.hostile.inputs import HARMLESS, HOSTILE, LONG_TO_COMPILE
from testkit.memory import most_memory
from tests.engine.conftest import MakeModel
from tests.watching import calls_of

UNRULY = ChildKind("tests.isolation.unruly", "renders chat templates")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is\n\nthe <mug>? "},
    {"role": "assistant", "content": "<think>hm</think> There."},
    {"role": "user", "content": "Thanks."},
]

HONEST = {
    name: text
    for name, text in vars(llama_chat_format).items()
    if name.endswith("_CHAT_TEMPLATE") and isinstance(text, str)
}
CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = HOSTILE["loops in loops"]

Open = Callable[[str], TemplateRenderer]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes templates, and closes them."""
    with ExitStack() as stack:
        yield lambda source: stack.enter_context(closing(TemplateRenderer(source, "a model")))


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [child for child in found if any("template_sandbox" in word for word in child.cmdline())]


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_template_writes_what_it_wrote_before(opened: Open, name: str) -> None:
    """And is within the limits for a thousand turns of half a million characters."""
    source, alternates = HONEST[name], "alternate" in HONEST[name]
    plain, template = Jinja2ChatFormatter(template=source, eos_token="<eos>", bos_token="<bos>"), opened(source)
    talk = TALK[1:] if alternates else TALK
    assert template.render(talk, "<bos>", "<eos>") == plain(messages=talk).prompt  # type: ignore[arg-type]
    if not alternates:
        long = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 100} for i in range(1000)]
        assert template.render(long, "<bos>", "<eos>")


def test_arguments_are_asked_of_the_child_before_and_after_a_conversation(opened: Open) -> None:
    template = opened("{{ mood }}" + CONTENTS)
    assert template.arguments == ["messages", "mood"]
    assert template.render(said("a"), "", "", {"mood": "<"}) == "<a"
    assert template.arguments == ["messages", "mood"]
    assert template.render(said("a"), "", "", {"arguments_of": "x", "source": "y"}) == "a"
    assert len(children()) == 1


@pytest.mark.parametrize(
    ("act", "why"), [("nothing", "arguments are unknown"), ("a value", "arguments are unknown"), ("abort", "SIGABRT")]
)
def test_arguments_are_not_taken_for_granted(opened: Open, monkeypatch: pytest.MonkeyPatch, act: str, why: str) -> None:
    monkeypatch.setattr(chat_template, "KIND", UNRULY)
    with pytest.raises(ModelUnsupported, match=why):
        _ = opened(f"#{act}#").arguments


def test_any_text_arrives(opened: Open) -> None:
    template = opened(CONTENTS)
    for content in ("", "\0", "\ud800 \udfff", "\ue0000\ue001", "ünï 🙂\u2028\r\n", "'\"\\", "a" * 2**20):
        assert template.render(said(content), "", "") == content


def test_a_long_message_is_within_the_limits(opened: Open) -> None:
    """Of 4 MiB, at which a template looks many times."""
    template = opened("{% for m in messages %}{{ m.content.strip() ~ m.content.split('a')[-1] }}{% endfor %}")
    for content in ("word " * 800_000, "🙂 " * 800_000):
        assert template.render(said(content), "", "")


@pytest.mark.nightly
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_before_harm(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each one is stopped by a limit, or writes no more than it may."""
    if name not in HARMLESS:
        monkeypatch.setattr(chat_template, "SECONDS", 0.1)
    before = most_memory()
    template = opened(HOSTILE[name])
    if name in HARMLESS:
        assert len(template.render(TALK, "<bos>", "<eos>")) < 2**20
    else:
        with pytest.raises(ModelUnsupported, match="chat template of a model fails") as caught:
            template.render(TALK, "<bos>", "<eos>")
        assert len(str(caught.value)) < 1_000
    assert most_memory() - before < 256 * 2**20


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (ENDLESS, "more than 1.0 s of the processor"),
        (HOSTILE["repetition"], "exceeds its memory limit"),
        (HOSTILE["a long text"], r"its answer has 80000\d\d bytes; 1\d{6} are"),
        ("{# #}" * MOST_SOURCE, rf"it has \d+ characters; at most {MOST_SOURCE} are allowed"),
    ],
)
def test_which_limit_was_reached_is_told_and_the_next_conversation_is_rendered(
    opened: Open, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)  # a busy machine compiles the other template in this time, too
    template = opened(f"{{% if messages|length > 1 %}}{source}{{% endif %}}{CONTENTS}")
    for _ in range(2):
        with pytest.raises(ModelUnsupported, match=why):
            template.render(said("a", "b"), "", "")
        if len(source) < MOST_SOURCE:
            assert template.render(said("mug"), "", "") == "mug"


@pytest.mark.parametrize("name", LONG_TO_COMPILE)
def test_no_expression_is_evaluated_while_it_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja's optimizer evaluates each part of an expression once for every level above it, and that in turn."""
    kinds = (nodes.Or, nodes.And, nodes.Add, nodes.Filter, nodes.Name)
    evaluations = [calls_of(monkeypatch, kind, "as_const") for kind in kinds]
    compile_template(LONG_TO_COMPILE[name] * 3)
    assert sum(map(len, evaluations)) < 6 * len(LONG_TO_COMPILE[name])


def test_compiling_has_the_limits_of_rendering(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    statement = LONG_TO_COMPILE["ors"]
    for limit, value, why in (("SECONDS", 0.0, "of the processor"), ("MEMORY", -(2**40), "of memory")):
        with monkeypatch.context() as patched:
            patched.setattr(chat_template, limit, value)
            long = opened(statement * (MOST_SOURCE // len(statement)))
            with pytest.raises(ModelUnsupported, match=why):
                long.render(said("a"), "", "")


def test_threads_render_by_turns_in_one_process(opened: Open) -> None:
    template = opened(CONTENTS)
    together = threading.Barrier(8)

    def render(number: int) -> list[str]:
        together.wait()
        return [template.render(said(f"{number} {i} " * 100), "", "") for i in range(20)]

    with ThreadPoolExecutor(8) as pool:
        for number, texts in enumerate(pool.map(render, range(8))):
            assert texts == [f"{number} {i} " * 100 for i in range(20)]
    assert len(children()) == 1


def test_the_process_sees_no_variable_of_ours(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    here, hour = ZoneInfo("Pacific/Kiritimati"), "%d %H"
    before = datetime.now(here).strftime(hour)
    wrote = opened(f"{{{{ strftime_now({hour!r}) }}}}").render(said("a"), "", "")
    assert wrote in (before, datetime.now(here).strftime(hour))
    (child,) = children()
    assert {*child.environ()} <= {"PYTHONPATH", "TZ", "LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "LC_CTYPE"}


def test_a_bundled_template_is_known_and_rendered_here(draft_model: Model, verifier_model: Model, opened: Open) -> None:
    for model in (draft_model, verifier_model):
        assert model.chat_prompt([Message("user", "Where is my mug?")]).size
        assert not children()
        source = model.chat_template_source
        known, edited = opened(source), opened(source + "{# #}")
        known.start()
        assert known.render(TALK, "<bos>", "<eos>") == edited.render(TALK, "<bos>", "<eos>")
        assert len(children()) == 1
        edited.close()


def test_the_process_starts_while_a_model_is_loaded_and_ends_with_it(make_model: MakeModel) -> None:
    path = make_model().path
    with Model.load(path) as model:
        assert not children()
        model.chat_prompt([Message("user", "a")])
        assert len(children()) == 1
    assert not children()
    shares = []
    with Model.load(path, LoadSpec(chat=True), progress=lambda share: shares.append((share, len(children())))) as model:
        assert shares[-1][1] == 1
        (child,) = children()
        model.chat_prompt([Message("user", "a")])
        assert children() == [child]
    assert not children()

    def stop(_share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model.load(path, LoadSpec(chat=True), progress=stop)
    assert not children()
