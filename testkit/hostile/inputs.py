"""Chat templates that would take all time or memory, and texts that hold up a tokenizer."""

import base64
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from edgellm.engine.chat.template import MOST_SOURCE
from testkit.gguf.random_model import CONTROL

_LONG = "a" * 30_000

HOSTILE = MappingProxyType({
    "repetition": "{{ 'a' * 10**10 }}",
    "repetition, folded": "{% if false %}{{ ('a' * 10**10)|length }}{% endif %}{{ 'a' * 10**9 }}",
    "repeated list": "{{ ([0] * 10**9)|length }}",
    "repetition the other way": "{{ (10**9 * 'ab')|length }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text in loops": "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "loops over text": "{% set s = 'a' * 5000 %}" + "{% for a in s %}" * 4 + "{% endfor %}" * 4,
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "adding": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "blocks of blocks": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "lists of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "dicts of dicts": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}"
    "{% endfor %}",
    "namespaces": "{% set a = namespace() %}" + "{% set b = namespace(x=a, y=a) %}"
    "{% set a = namespace(x=b, y=b) %}" * 40 + "{{ a }}",
    "a namespace in itself": "{% set a = namespace() %}{% set a.a = a %}{{ [a]|string }}",
    "slices": "{% set s = 'a' * 1000000 %}" + "".join(f"{{% set x{i} = s[1:] %}}" for i in range(99)),
    "replace": "{% set s = 'a' * 100000 %}{{ s|replace('a', s)|length }}",
    "replace, method": "{% set s = 'a' * 100000 %}{{ s.replace('a', s)|length }}",
    "join": "{% set s = 'a' * 100000 %}{{ range(99999)|join(s)|length }}",
    "join, method": "{% set s = 'a' * 100000 %}{{ s.join(s)|length }}",
    "indent": "{{ ('a\n' * 1000)|indent(10**9) }}",
    "tojson": "{{ [1, 2]|tojson(indent=10**9) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "ljust, safe": "{{ ('a'|safe).ljust(10**10) }}",
    "ljust, escaped": "{{ ('a'|e).ljust(10**10) }}",
    "ljust, of a block": "{% autoescape true %}{% set x %}a{% endset %}{{ x.ljust(10**10) }}{% endautoescape %}",
    "round": "{{ 1.5|round(10**9, 'ceil') }}",
    "fromkeys": "{{ dict.fromkeys(range(99999))|length }}",
    "a long complaint": "{{ raise_exception('a' * 1000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "format": "{{ '%999999999d'|format(1) }}",
    "format, operator": "{{ '%999999999d' % 1 }}",
    "format, method": "{{ '{:>999999999}'.format(1) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "translate": "{{ LONG.translate({97: 'a' * 100000})|length }}".replace("LONG", f"'{_LONG}'"),
    "sums": "{{ [[1]]|sum(start=[]) }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a recursive loop": "{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "search in search": "{% set s = range(99999)|list %}{{ s|select('in', s)|list|length }}",
    "a long text": "{{ 'ab' * 4000000 }}",
    "a long text, in parts": "{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "a long date": "{{ strftime_now('%999999999d') }}",
    "brackets": "{{ " + "(" * 30_000 + ")" * 30_000 + " }}",
    "ifs": "{% if true %}" * 5_000 + "{% endif %}" * 5_000,
    "lists": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "sums of sums": "{{ 1" + "+1" * 30_000 + " }}",
    "too long": "{# #}" * (MOST_SOURCE // 5 + 1),
})  # fmt: skip

HARMLESS = frozenset({"dicts of dicts", "a namespace in itself", "fromkeys", "sums", "a long date"})
"""Templates within the limits, which are rendered."""

# Known and obvious escapes from sandboxes. MARK is a file that would be written.
ESCAPES = MappingProxyType({
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes, by item": "{{ ''['__class__']['__mro__'] }}",
    "classes, by filter": "{{ ''|attr('__class__') }}",
    "classes, by map": "{{ messages|map(attribute='__class__')|list }}",
    "classes, in a loop": "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': messages}) }}",
    "format, stored": "{{ namespace(f='{0.__class__.__mro__}'.format).f(messages) }}",
    "format, by filter": "{{ ('{0.__class__.__mro__}'|attr('format'))(messages) }}",
    "format, by map": "{{ ['{0.__class__.__mro__}'.format]|map('string')|list }}",
    "format, in a macro": "{% macro f(g) %}{{ g(messages) }}{% endmacro %}{{ f('{0.__class__.__mro__}'.format) }}",
    "format, of a block": "{% set x %}{0.__class__.__mro__}{% endset %}{{ x.format(messages) }}",
    "system": "{{ raise_exception.__globals__['os'].system('touch MARK') }}",
    "open": "{{ strftime_now.__globals__.__builtins__.open('MARK', 'w') }}",
    "popen": "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "fork": "{{ cycler.__init__.__globals__.os.fork() }}",
    "exec": "{{ joiner.__init__.__globals__.os.execv('/bin/sh', ['sh', '-c', 'touch MARK']) }}",
    "socket": "{{ lipsum.__globals__['__builtins__']['__import__']('socket').socket() }}",
    "the template itself": "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.popen('touch MARK') }}",
    "the environment": "{{ self.__init__.__globals__ }}{{ loop.__class__ }}",
    "frames": "{% set g = messages|map('upper') %}{{ g.gi_frame.f_globals }}",
    "code": "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}{{ raise_exception.__code__.co_consts }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}{{ x }}",
    "extends": "{% extends '/etc/passwd' %}",
    "lists": "{{ messages.append(1) }}",
    "messages": "{{ messages[0].update(content='b') }}",
    "globals": "{% set range = dict %}{{ range.__init__ }}",
    "debug": "{% debug %}",
    "do": "{% do messages.clear() %}",
})  # fmt: skip

# Statements that are harmless to render, but of which as many as a template may have took half a minute to compile.
LONG_TO_COMPILE = MappingProxyType({
    "ors": "{% if a" + " or a" * 189 + " %}{% endif %}",
    "ands": "{{ a" + " and a" * 150 + " }}",
    "sums": "{{ 1" + " + 1" * 150 + " }}",
    "filters": "{{ a" + "|e" * 150 + " }}",
})  # fmt: skip

# One name (`tokenizer.ggml.pre`) for each of llama.cpp's methods of splitting words.
PRE_TOKENIZERS = (
    "default", "llama-bpe", "jais-2", "dbrx", "deepseek-llm", "deepseek-v3", "deepseek-coder", "spark2_5", "youtu",
    "falcon", "starcoder", "gpt-2", "qwen2", "qwen35", "poro-chat", "chatglm-bpe", "viking", "tekken", "chameleon",
    "gpt-4o", "granite-embed-multi-97m", "tiny_aya", "kimi-k2", "superbpe", "bailingmoe", "seed-coder", "ufakzeka",
    "grok-2", "afmoe", "laguna", "exaone-moe", "gemma4", "sarvam-moe", "minicpm5", "whitespace",
)  # fmt: skip


TEXTS: Mapping[str, Callable[[int], str]] = MappingProxyType({
    "letters": lambda n: "a" * n,
    "capitals": lambda n: "A" * n,
    "digits": lambda n: "7" * n,
    "spaces": lambda n: " " * n,
    "line ends": lambda n: "\n" * n,
    "dashes": lambda n: "-" * n,
    "base64": lambda n: base64.b64encode(random.Random(0).randbytes(n)).decode()[:n],
    "Chinese": lambda n: "中" * (n // 3),
    "accents": lambda n: "\u0301" * (n // 2),
    "words": lambda n: "a " * (n // 2),
    "control tokens": lambda n: CONTROL[0] * (n // len(CONTROL[0])),
    "control names": lambda n: "<|" * (n // 2),
})  # fmt: skip
