"""Chat templates in the shapes of the published ones, and dialogues that try them."""

# The shape of Gemma 1 and 2: no system, turns in strict order, contents trimmed.
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('no system turn here') }}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# The shape of Gemma 3: a system text goes in front of the first user's, contents may be in parts.
GEMMA3 = """
{%- set text = namespace(first='') -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set text.first = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set text.first = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{{ bos_token }}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("turns must go user, assistant, user, assistant") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\n' }}
    {{- text.first if loop.first else '' }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for part in turn['content'] -%}
            {%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("a content of another kind") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

# The shape of Qwen 3: tools, tool calls and results, thoughts behind the last question alone.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Functions\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set place = messages|length - 1 - loop.index0 %}
    {%- if seen.searching and message.role == 'user' and message.content is string and
        not (message.content.startswith('<tool_response>')) %}
        {%- set seen.searching = false %}
        {%- set seen.last = place %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > seen.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- ('\\n' if content or not loop.first else '') + '<tool_call>\\n{"name": "' }}
            {{- call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# The same, which says by itself what the model's own words are.
MARKED = QWEN3.replace("{{- content }}", "{%- generation %}{{- content }}").replace(
    """
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}""",
    """
        {{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- elif message.role == 'tool' %}""",
)

# Marks inside of which the text of a reply alone stands.
GEMMA_MARKED = GEMMA2.replace(
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}",
    "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}"
    "{{ message.content | trim }}{% endgeneration %}{% else %}{{ message.content | trim }}"
    "{% endif %}{{ '<end_of_turn>\n' }}",
)

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a <place> & its \u00e9t\u00e9.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def said(*turns):
    """A dialogue of (role, content), or of whole messages."""
    return [t if isinstance(t, dict) else {"role": t[0], "content": t[1]} for t in turns]


def _call(content, *arguments, inner=True):
    calls = [{"name": "weather", "arguments": given} for given in arguments]
    if inner:
        calls = [{"type": "function", "id": "1", "function": call} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": calls}


S, U, A, T = "system", "user", "assistant", "tool"
TURNS = {
    "one question": [(U, "Hello!")],
    "answered": [(U, "Hello!"), (A, "Hi there.")],
    "two rounds": [(U, "a"), (A, "b"), (U, "c")],
    "three rounds": [(U, "1"), (A, "2"), (U, "3"), (A, "4"), (U, "5"), (A, "6")],
    "system": [(S, "Be brief."), (U, "Hello!")],
    "system answered": [(S, "Be brief."), (U, "a"), (A, "b"), (U, "c"), (A, "d")],
    "blanks around": [(U, "  two blanks  "), (A, "\n\nlines\n"), (U, "\tend ")],
    "blank system": [(S, "  \n "), (U, "Hello!")],
    "empty question": [(U, "")],
    "empty answer": [(U, "Hello!"), (A, ""), (U, "?")],
    "only blanks": [(U, " \n\t "), (A, " ")],
    "lines": [(U, "one\ntwo\n\n\nthree\r\nfour"), (A, "- a\n- b\n  - c\n")],
    "code": [(U, "Write code."), (A, "```python\nif x:\n    pass\n```\n")],
    "unicode": [(U, "na\u00efve \u65e5\u672c\u8a9e \U0001f600\u200d"), (A, "\u00bfQu\u00e9?")],
    "combining": [(U, "e\u0301 \u2126 \ufb01"), (A, "\u0130stanbul\u00a0\u2028!")],
    "emoji at the end": [(U, "Hi"), (A, "Hi \U0001f600")],
    "quotes and braces": [(U, "{{ bos_token }} {% if %} 'a' \"b\" <b>&amp;</b>")],
    "control tokens in a text": [(U, "<end_of_turn><|im_end|><bos>"), (A, "<eos>")],
    "markers of tools in a text": [(U, "<tool_response>x"), (A, "y"), (U, "z")],
    "long": [(U, "word " * 200), (A, "answer " * 100)],
    "None is left out": [
        {"role": U, "content": "Hi", "name": None},
        {"role": A, "content": "x", "tool_calls": None},
    ],
    "thoughts": [
        *((U, "a"), (A, "<think>\nhm\n</think>\n\nb")),
        *((U, "c"), (A, "<think>\nso\n</think>\n\nd")),
    ],
    "thoughts apart": [(U, "a"), {"role": A, "content": "b", "reasoning_content": "hm\n"}],
    "thoughts by another name": [
        *((U, "a"), {"role": A, "content": "b", "reasoning": "hm"}, (U, "c"))
    ],
    "no thinking": [(U, "a")],
    "thinking": [(U, "a")],
    "tools": [(U, "Weather?")],
    "tools and system": [(S, "Be kind."), (U, "Weather?")],
    "a call and its result": [
        *((U, "Weather?"), _call("", {"place": "Z\u00fcrich"})),
        *((T, "sun"), (A, "It is sunny.")),
    ],
    "two calls": [
        *((U, "?"), _call("Looking.", {"place": "a"}, {"n": 1.5})),
        *((T, "x"), (T, " y\n"), (A, "z")),
    ],
    "a call without content": [(U, "?"), _call(None, '{"place": "a"}', inner=False), (T, "x")],
    "parts": [(U, [{"type": "text", "text": x} for x in (" one ", "two")]), (A, "b")],
    # Some templates refuse these.
    "system in parts": [(S, [{"type": "text", "text": "Be brief."}]), (U, "a")],
    "the assistant begins": [(A, "a"), (U, "b")],
    "two questions": [(U, "a"), (U, "b")],
    "a late system": [(U, "a"), (S, "b"), (U, "c")],
    "no content": [{"role": U}],
    "another role": [("critic", "a")],
    "documents": [(U, "a")],
}
OPTIONS = {
    "no thinking": {"enable_thinking": False},
    "thinking": {"enable_thinking": True},
    **{name: {"tools": [TOOL]} for name in ("tools", "a call and its result", "two calls")},
    "tools and system": {"tools": [TOOL, TOOL]},
    "documents": {"documents": [{"title": "t", "text": "x"}]},
}
# Name to dialogue and options of the template.
DIALOGUES = {name: (said(*turns), OPTIONS.get(name, {})) for name, turns in TURNS.items()}
