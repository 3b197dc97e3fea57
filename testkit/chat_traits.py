"""Small chat templates, each with one trait of a family: what it wants of a conversation, or does not write.

The bundled pair's control tokens are used, so its models can read all of them.
"""

_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }} <tool_call></tool_call><|end|>{% endif %}"
_CALL = "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
_CALLS = f"{{% for c in m.tool_calls or [] %}}{_CALL}{{% endfor %}}"
_TURN = "<|{{ 'user' if m.role == 'tool' else m.role }}|>"
_TEXT = _TURN + "{{ m.content }}"
_ASKS = "<|assistant|>"


def _each(turn: str, before: str = _TOOLS) -> str:
    return f"{before}{{% for m in messages %}}{turn}{{% endfor %}}{_ASKS}"


def _raises(when: str, why: str) -> str:
    return f"{{% if {when} %}}{{{{ raise_exception('{why}') }}}}{{% endif %}}"


PLAIN = _each(f"{_TEXT}{_CALLS}<|end|>")
ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' and not"
    " m.tool_calls %}" + _raises("(m.role == 'user') != (ns.n % 2 == 0)", "turns")
    + "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)  # fmt: skip
NINE = _raises("m.tool_calls and m.tool_calls | map(attribute='id') | map('length') | reject('eq', 9) | list", "id")
NINE += _raises("m.role == 'tool' and m.tool_call_id | length != 9", "id of a result")
TRAITS = {
    "plain": PLAIN,
    "ends only a turn that has a text": _each(_TEXT + _CALLS + "{% if m.content %}<|end|>{% endif %}"),
    "ends only a turn that has more than blanks": _each(_TEXT + _CALLS + "{% if m.content | trim %}<|end|>{% endif %}"),
    "wants thought or text beside a call": _each(
        _raises("m.tool_calls and m.content and m.thinking", "both")
        + _TURN + "{{ m.thinking }}{{ m.content }}" + _CALLS + "<|end|>"
    ),
    "leaves an empty turn out": _each("{% if m.content or m.tool_calls %}" + _TEXT + _CALLS + "<|end|>{% endif %}"),
    "ids of nine characters": _each(NINE + _TEXT + _CALLS + "<|end|>"),
    "one call at once": _each(
        _raises("m.tool_calls and m.tool_calls | length > 1", "one") + _TEXT + _CALLS + "<|end|>"
    ),
    "only the first call": _each(_TEXT + _CALLS.replace("or []", "and m.tool_calls[:1] or []") + "<|end|>"),
    "no text beside a call": _each(
        _TURN + "{% if m.tool_calls %}" + _CALLS + "{% else %}{{ m.content }}{% endif %}<|end|>"
    ),
    "arguments are a text": _each(_TEXT + _CALLS.replace(" }} {{", " + ' ' +").replace(" | tojson", "") + "<|end|>"),
    "arguments are an object": _each(
        _TEXT + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "{{ k }}={{ v }};{% endfor %}{% endfor %}<|end|>"
    ),
    "no calls in the history": _each(_TEXT + "<|end|>"),
    "no turns of tools": _each(_raises("m.role == 'tool'", "role") + _TEXT + _CALLS + "<|end|>"),
    "results only by the ids of their calls": _each(
        "{% if m.role != 'tool' %}" + _TEXT + _CALLS + "{% for c in m.tool_calls or [] %}{% for r in messages %}"
        "{% if r.role == 'tool' and r.tool_call_id == c.id %}{{ r.content }}{% endif %}{% endfor %}{% endfor %}"
        "<|end|>{% endif %}"
    ),
    "results have names": _each(_raises("m.role == 'tool' and not m.name", "name") + _TEXT + _CALLS + "<|end|>"),
    "a result follows a call": _each(
        _raises("m.role == 'tool' and not (loop.previtem.tool_calls or loop.previtem.role == 'tool')", "call")
        + _TEXT + _CALLS + "<|end|>"
    ),
    "system first": _each(_raises("m.role == 'system' and not loop.first", "first") + _TEXT + _CALLS + "<|end|>"),
    "system of the first only": _each(
        "{% if m.role != 'system' or loop.first %}" + _TEXT + _CALLS + "<|end|>{% endif %}"
    ),
    "system of the last only": _each(
        "{% if m.role != 'system' %}" + _TEXT + _CALLS + "<|end|>{% endif %}",
        _TOOLS + "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% endfor %}<|system|>{{ ns.s }}<|end|>",
    ),
    "no system": _each(_raises("m.role == 'system'", "system") + _TEXT + _CALLS + "<|end|>"),
    "no system, silently": _each("{% if m.role != 'system' %}" + _TEXT + _CALLS + "<|end|>{% endif %}"),
    "turns alternate": ALTERNATING + _each(_TEXT + _CALLS + "<|end|>"),
    "functions as a text": "{{ functions + datetime + (messages | map(attribute='role') | tojson) }}" + PLAIN,
    "as strict as Mistral's": ALTERNATING + _each(
        NINE + _raises("m.role == 'system' and not loop.first", "first") + _TURN
        + "{% if m.tool_calls %}" + _CALLS + "{% else %}{{ m.content }}{% endif %}<|end|>"
    ),
    "user first": _raises("messages[0].role not in ('user', 'system')", "user") + PLAIN,
    "tools are a list": _each(
        _TEXT + _CALLS + "<|end|>", "{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>"
    ),
    "tools have all fields": _each(
        _TEXT + _CALLS + "<|end|>", "{% for t in tools or [] %}<tool_call>"
        "{{ t.function.name + t.function.description }}"
        "{% for k, v in t.function.parameters.properties | items %}{{ k }}{{ v | tojson }}{% endfor %}{% endfor %}",
    ),
    "JSON in ASCII": PLAIN.replace("tojson", "tojson(ensure_ascii=True)"),
    "strips texts": PLAIN.replace("m.content", "m.content | trim"),
    "thoughts in the text": _each(
        _TURN + "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}" + _CALLS + "<|end|>"
    ),
}  # fmt: skip
