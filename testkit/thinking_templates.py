"""Small chat templates with thoughts, in the style of each family, and models that use them.

The bundled pair's control tokens are used, so its models can write with all of them.
"""

from pathlib import Path

from edgellm.engine.gguf import writer
from testkit.gguf.changed import with_entries

_TEMPLATE = "tokenizer.chat_template"
_BEGIN = "{{ '<|begin|>' }}"
_TURN = "{{ '<|' + m.role + '|>' + content + '<|end|>' }}"

LITERAL = (
    _BEGIN + "{%- set last = namespace(user=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{% set content = m.content %}{% set thought = '' %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{%- elif '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{%- if thought and loop.index0 > last.user %}"
    "{% set content = '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' + content %}{% endif %}{% endif %}"
    + _TURN
    + "{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{%- endif %}"
)
"""As Qwen3: the model writes <think> itself; switched off by an empty thought."""

OPENED = (
    _BEGIN + "{%- for m in messages %}{% set content = m.content.split('</think>')[-1] %}" + _TURN + "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
"""As Qwen3.5: the prompt ends with <think>."""

ALWAYS = (
    _BEGIN + "{%- for m in messages %}{% set content = m.content %}"
    "{%- if m.role == 'assistant' and '</think>' in content %}{% set content = content.split('</think>')[-1] %}"
    "{% endif %}" + _TURN + "{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)
"""As DeepSeek-R1: the prompt ends with <think>, and nothing switches that off."""

CHANNELS = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and ('<|channel|>analysis' in m.content or '<|channel|>final' in m.content) %}"
    "{{ raise_exception('You have passed a message containing <|channel|> tags in the content field.') }}{% endif %}"
    "{{- '<|start|>' + m.role + ('<|channel|>final' if m.role == 'assistant' else '') + '<|message|>' + m.content }}"
    "{{- '<|end|>' }}{% endfor %}{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""As gpt-oss: harmony channels, and markup in the history is refused."""

MARKERS = (
    "{{ bos_token }}{%- if enable_thinking is defined and enable_thinking %}{{ '<|turn>system\\n<|think|><turn|>\\n' }}"
    "{% endif %}{%- for m in messages %}{{ '<|turn>' + m.role + '\\n' + m.content.strip() + '<turn|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}"
    "{%- if not enable_thinking | default(false) %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}{% endif %}"
)
"""As Gemma 4: markers of its own; without enable_thinking an empty thought."""

FAMILIES = {"literal": LITERAL, "opened": OPENED, "always": ALWAYS, "channels": CHANNELS, "markers": MARKERS}


def with_template(source: Path, target: Path, template: str) -> Path:
    """Write a copy of a model with another chat template, and return `target`."""
    return with_entries(source, target, {_TEMPLATE: writer.entry(_TEMPLATE, template)})
