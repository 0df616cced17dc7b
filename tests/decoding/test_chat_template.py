"""Templates write what they write in transformers, and one that has no end, or reaches out, is stopped."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from tarnn.decoding.chat_template import read_chat_templates, render
from tarnn.errors import UserError

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, turns=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and ns.turns == 0 %}
        {%- set ns.turns = 1 %}{%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' ~ reasoning.strip('\\n') ~ '\\n</think>\\n\\n' ~ content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
ODDS = """{% macro part(x, n=2) -%}
[{{ x }}|{{ n }}{{ caller() if caller }}]{%- endmacro %}
    {% if messages %}
  indented
    {% endif %}
{{ bos_token }}{{ '%s has %d' % ('a', 3) }}{{ '{:>5}-{}'.format(1, 'é') }}{{ part(3) }}{{ part('x', n=none) }}
{% call part('y') %}z{% endcall %}
{{ ['b', 'a'] | sort | join(', ') }}{{ [1, 2, 3] | map('string') | list }}{{ {'b': 1, 'a': [1, none]} | tojson(indent=2) }}
{% for k, v in {'x': 1, 'y': 2}.items() if v > 1 %}{{ k }}={{ v }}{% else %}none{% endfor %}
{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if m.role == 'tool' %}{% continue %}{% endif %}
  {{ loop.index0 }}{{ m.content | default('nothing', true) | trim | upper | replace('A', 'bb') | indent(3) }}
{% endfor %}
{% generation %}{{ 'answer' }}{% endgeneration %}
{% set text %}{{ messages | length }} messages{% endset %}{{ text | title }}
{{ 'ab' * 3 + 'c' ~ 1 ~ none ~ true }}{{ [1] + [2] }}{{ (1, 2) }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ 7 % 4 }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first | default('no user') }}
{{ ('user' in messages | map(attribute='role') | list) }}{{ dict(a=1) }}{{ undefined_name }}{{ messages[0].nothing }}
{%- filter upper %} shout {% endfilter %}
{{ messages | groupby('role') | map('first') | join('/') }}{{ '<b>' | e }}{{ [3, 1] | max }}{{ [1, 2] | sum }}
"""
TOOLS = [
    {"type": "function", "function": {"name": "wéather", "parameters": {"city": {"type": "string", "enum": ["<a>&"]}}}}
]

texts = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ["<think>\nhm\n</think>\n\nyes", "<|im_end|>", " a "]
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": texts},
    optional={
        "reasoning": texts,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"name": texts, "arguments": texts | st.dictionaries(texts, texts)})
        ),
        "nothing": st.none(),
    },
)


@pytest.mark.parametrize("template", [CHATML, ODDS], ids=["ChatML", "odds"])
@given(
    conversation=st.lists(messages, min_size=1, max_size=6),
    tools=st.none() | st.just(TOOLS),
    ready=st.booleans(),
    more=st.just({}) | st.just({"enable_thinking": False}),
)
@settings(max_examples=60, deadline=None)
def test_templates_write_what_they_do_in_transformers(template, conversation, tools, ready, more):
    more = more | {"bos_token": "<s>"}
    [[expected], _] = render_jinja_template(
        [[{key: x for key, x in message.items() if x is not None} for message in conversation]],
        tools=tools,
        chat_template=template,
        add_generation_prompt=ready,
        **more,
    )
    assert render(template, conversation, tools=tools, documents=None, add_generation_prompt=ready, **more) == expected


def test_numbers_in_formats_are_no_widths():
    assert (
        render("{{ '%s of 2026' % 'May' }} {{ '{} of 2026: {:>3}'.format('May', 7) }}", [])
        == "May of 2026 May of 2026:   7"
    )


def test_the_time_of_now():
    year = render("{{ strftime_now('%Y') }}", [])
    assert year.isdigit()
    assert len(year) == 4


def test_a_long_conversation_is_written():
    """A book in a message, and a thousand messages, are within the allowance."""
    book = [{"role": "user", "content": "word " * 400_000}, {"role": "assistant", "content": "é" * 300_000}]
    assert len(render(CHATML, book, tools=None)) > 2_300_000
    long = [{"role": "user", "content": "word " * 6_000_000}]
    assert len(render("{{ messages[0].content | trim }}", long)) == 29_999_999
    many = [{"role": role, "content": f"{i}"} for i in range(600) for role in ("user", "assistant")]
    assert render(CHATML, many, tools=TOOLS * 5).count("<|im_start|>") == 1201


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that filter": "{% set r = range(99999) %}{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a tree of calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a loop that calls itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "looks through": "{% set r = range(99999)|list %}{% for i in r %}{% if -1 in r %}{% endif %}{% endfor %}",
    "literal text": "{% set x %}{% for i in range(99999) %}" + "a" * 10_000 + "{% endfor %}{% endset %}",
    "output": "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "texts times a number": "{{ 'a' * 10**12 }}",
    "lists times a number": "{{ 10**12 * [1] }}",
    "powers": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set n=namespace(x=2) %}{% for a in range(999) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "sums": "{% set n=namespace(x='a') %}{% for a in range(999) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "joins": "{% set n=namespace(x='a') %}{% for a in range(999) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "lists of themselves": "{% set n=namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "dicts of themselves": "{% set n=namespace(x=1) %}{% for a in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
    "a filter that replaces": "{% set n=namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x|replace('a','aaa') %}"
    "{% endfor %}",
    "a method that replaces": "{% set n=namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x.replace('a','aaa') %}"
    "{% endfor %}",
    "a filter that joins": "{{ (['a' * 999999] * 99999) | join }}",
    "a method that joins": "{{ ''.join(['a' * 999999] * 99999) }}",
    "a filter that sums": "{{ ([range(99999)|list] * 9999) | sum(start=[]) }}",
    "a list as text": "{{ (['a' * 999999] * 99999) | string }}",
    "a list written": "{{ ['a' * 999999] * 99999 }}",
    "a list in JSON": "{{ (['a' * 999999] * 99999) | tojson }}",
    "JSON indented": "{{ [1] | tojson(indent=10**11) }}",
    "a text indented": "{{ 'a' | indent(10**11, true) }}",
    "a block indented": "{% filter indent(99999999) %}a{% endfilter %}",
    "filled up": "{{ 'a'.ljust(10**11) }}",
    "zeros": "{{ 'a'.zfill(10**11) }}",
    "a text many times in a format": "{% set a = 'a' * 9999999 %}{{ ('{0}' * 99999).format(a) }}",
    "a text many times by name": "{% set d = dict(a='a' * 9999999) %}{{ ('%(a)s' * 99999) % d }}",
    "a text many times by a filter": "{{ ('%(a)s' * 99999) | format(a='a' * 9999999) }}",
    "a text in pieces": "{{ ('aa ' * 4999999).split() | length }}",
    "a joiner": "{{ joiner('a' * 10**9) }}",
}
WIDE = {
    "percent": "{{ '%99999999999d' % 3 }}",
    "a width computed": "{{ '%*d' % (10**9, 3) }}",
    "braces": "{{ '{:>99999999999}'.format(3) }}",
    "braces computed": "{{ '{:>{}}'.format(3, 10**10) }}",
    "a method kept": "{% set f = '{:>9999999999}'.format %}{{ f(3) }}",
    "a filter": "{{ '%999999999d' | format(3) }}",
    "the time": "{{ strftime_now('%9999999999d') }}",
    "a precision": "{{ '%.99999999f' % 3 }}",
    "by name": "{{ '%(a)99999d' % {'a': 3} }}",
}
FORBIDDEN = {
    "classes": ("{{ ''.__class__.__mro__ }}x", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__ }}x", "unsafe"),
    "by attr": ("{{ (''|attr('__class__')).x }}", "unsafe"),
    "by format": ("{{ '{0.__class__.x}'.format(3) }}", "unsafe"),
    "change": ("{{ messages.append(1) }}", "unsafe"),
    "bytes": ("{{ 'a'.encode() }}", "unsafe"),
    "private names": ("{% set ns = namespace(_x=1) %}", "begins with an underscore"),
    "private names later": ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "begins with an underscore"),
    "files": ("{% include '/etc/passwd' %}", "no loader"),
    "text without end": ("{{ lipsum(n=10**9) }}", "undefined"),
    "its own no": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "rows of tables": ("{{ messages|batch(10**10, 'x')|list }}", "No filter named 'batch'"),
}
CONVERSATION = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_end_is_stopped(kind):
    with pytest.raises(TemplateError, match="too many steps, or writes more"):
        render(ENDLESS[kind], CONVERSATION)


@pytest.mark.parametrize("kind", WIDE)
def test_a_template_that_fills_up_is_stopped(kind):
    with pytest.raises(TemplateError, match="a width that is computed or above 999"):
        render(WIDE[kind], CONVERSATION)


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_a_template_that_reaches_out_is_stopped(kind):
    template, message = FORBIDDEN[kind]
    with pytest.raises(Exception, match=message):
        render(template, CONVERSATION)


def test_a_conversation_is_plain_data():
    with pytest.raises(TypeError, match="made of texts, numbers, lists and dicts; got object"):
        render("", [{"role": "user", "content": object()}])


def test_templates_of_a_folder(tmp_path):
    assert read_chat_templates(tmp_path, {}) == {}
    assert read_chat_templates(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert read_chat_templates(tmp_path, {"chat_template": several}) == {"default": "a", "tool_use": "b"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("c")
    (tmp_path / "chat_template.jinja").write_text("d")
    assert read_chat_templates(tmp_path, {"chat_template": several}) == {"default": "d", "tool_use": "c"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": 3}, "chat_template in .* must be a text; got 3"),
        ({"chat_template": [{"name": "default"}]}, "must be a text; got None"),
        ({"chat_template": "a" * 2**21}, "has 2,097,152 characters; expected at most 1,048,576"),
    ],
)
def test_what_is_no_template(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        read_chat_templates(tmp_path, settings)


def test_a_template_that_is_no_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"chat_template\.jinja can't be read"):
        read_chat_templates(tmp_path, json.loads("{}"))
