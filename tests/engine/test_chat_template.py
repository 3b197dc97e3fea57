"""A chat template is a stranger's program: it gets the answers of the sandbox, and its limits."""

from __future__ import annotations

import pytest
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from llama_cpp import llama_chat_format
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from edgellm.engine import chat_template
from edgellm.engine.chat_template import Template
from testkit.hostile.inputs import HOSTILE, LONG_TO_COMPILE
from testkit.memory import most_memory

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is\n\nthe <mug>? "},
    {"role": "assistant", "content": "<think>hm</think> There."},
    {"role": "user", "content": "Thanks."},
]

HONEST = {
    "loops": "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ m['role'] }}"
    "{{ loop.previtem.role if loop.previtem is defined }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, found=false) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "slices": "{% for m in messages[1:] %}{{ m.content[:3] }}"
    "{% endfor %}{{ messages[::-1][0].role }}{{ messages|length - 1 }}",
    "macros": "{% macro say(m, end='!') %}[{{ m.role|upper }}]{{ m.content }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ say(m, end='?') }}{% endfor %}",
    "texts": "{% for m in messages %}{{ m.role ~ ': ' ~ m.content.strip() ~ 3 }}"
    "{{ m.content.split('</think>')[-1]|trim }}"
    "{{ m.content.replace('\\n', ' ') + '.' }}{{ '-' * 5 }}{{ m.content.startswith('T') }}"
    "{{ 'mug' in m.content }}{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
    "{{ messages | rejectattr('role', 'equalto', 'user') | list | length }}{{ {'a': [1, none]} | tojson(indent=2) }}"
    "{{ messages[1].content | tojson | safe }}{{ '<b>' | e }}"
    "{{ messages[0] | tojson }}{{ (messages[0] | items | list)[0][1] }}{{ 'x' | default('y') }}"
    "{{ tools | default([]) }}",
    "tests": "{{ tools is none }}{{ nothing is defined }}{{ messages is iterable }}{{ messages[0].content is string }}"
    "{{ 1 is in [1, 2] }}{{ 3 is odd }}{{ messages[0] is mapping }}",
    "blocks": "{%- set x -%} {{ messages[0].content }} {%- endset -%}{% generation %}{{ x }}{% endgeneration %}"
    "{% filter upper %}abc{{ bos_token }}"
    "{% endfilter %}{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 'a' * 2 }}",
    "lists": "{% macro tag(name, state, attrs=[]) %}{% set state.n = state.n + 1 %}<{{ name }}{{ state.n }}"
    "{% for a in attrs %} {{ a[0] + '=' ~ a[1]|string|replace('&', '&amp;') }}{% endfor %}>{% endmacro %}"
    "{% set ns = namespace(n=0, kept=[]) %}{{ tag('x', ns) }}{{ tag('y', ns, [('a', 1), ('b', 'c & d')]) }}"
    "{% for m in messages %}{% set ns.kept = ns.kept + [m] %}{% endfor %}{{ ns.kept|length }}{{ ns.kept[-1] }}"
    "{% for k, v in messages[0]|dictsort %}{{ k }}{{ v|tojson(ensure_ascii=false) }}{{ ',' if not loop.last }}"
    "{% endfor %}"
    "{{ {'b': [1, 2.5, true, none], 'a': {'x': ('y',)}} }}{{ 'x' if messages[0].get('tools') else [] }}",
    "dates": "{{ strftime_now('%Y') }}{{ eos_token }}{% if add_generation_prompt %}assistant{% endif %}",
    **{
        name: text
        for name, text in vars(llama_chat_format).items()
        if name.endswith("_CHAT_TEMPLATE") and isinstance(text, str)
    },
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_template_writes_what_it_wrote_before(name: str) -> None:
    source = HONEST[name]
    plain = Jinja2ChatFormatter(template=source, eos_token="<eos>", bos_token="<bos>")
    talk = TALK[1:] if "alternate" in source else TALK
    assert Template(source).render(talk, "<bos>", "<eos>") == plain(messages=talk).prompt  # type: ignore[arg-type]


def test_a_long_conversation_is_within_the_limits() -> None:
    """A thousand turns, half a million characters, and a template that looks at each of them many times."""
    talk = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 100} for i in range(1000)]
    for name, source in HONEST.items():
        if "alternate" not in source:
            assert Template(source).render(talk, "<bos>", "<eos>"), name
    one = [{"role": "user", "content": "word " * 200_000}]
    assert Template(HONEST["texts"]).render(one, "", "")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_before_it_does_harm(name: str) -> None:
    """How much memory each takes at most, `python -m bench.robustness.fuzz templates` measures in a process of its
    own."""
    before = most_memory()
    with pytest.raises(Exception, match=r".") as caught:
        Template(HOSTILE[name]).render(TALK, "<bos>", "<eos>")
    assert not isinstance(caught.value, MemoryError)
    assert most_memory() - before < 256 * 2**20


@pytest.mark.parametrize("name", LONG_TO_COMPILE)
def test_no_expression_is_evaluated_while_it_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja's optimizer evaluates each part of an expression once for every level above it, and that in turn."""
    calls = 0
    for kind in (nodes.Or, nodes.And, nodes.Add, nodes.Filter, nodes.Name):

        def counted(node: nodes.Expr, *values: object, _kind: type = kind, _plain: object = kind.as_const) -> object:
            nonlocal calls
            calls += 1
            return _plain(node, *values)  # type: ignore[operator]

        monkeypatch.setattr(kind, "as_const", counted)
    Template(LONG_TO_COMPILE[name] * 3)
    assert calls < 6 * len(LONG_TO_COMPILE[name])


def test_compiling_has_the_limits_of_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ a }}" * 1000
    Template(source)
    with monkeypatch.context() as patched:
        patched.setattr(chat_template, "SECONDS", 0.0)
        with pytest.raises(SecurityError, match="more than a chat template may"):
            Template(source)
    monkeypatch.setattr(chat_template, "MOST_WORK", 10_000)
    with pytest.raises(SecurityError, match="more than a chat template may"):
        Template(source)
