"""Chat templates that would never end or fill the memory are refused in one line."""

import pytest

from chat_cases import said
from kmodels.text import chat_template
from refusals import refused

ENDLESS = {
    "range": "{% for i in range(10**9) %}a{% endfor %}",
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "text in a loop": "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "times": "{{ 'a' * 10**9 }}",
    "list times": "{{ ([1] * 10**9) | length }}",
    "nested list times": "{{ (['a' * 10**6] * 10**6) | join }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 10**9) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "indents": "{{ ('a\n' * 10**6) | indent(10**6) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "tojson": "{{ [1] | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "replace method": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "join method": "{{ ('a' * 10**6).join(['b'] * 10**6) }}",
    "map": "{{ range(99999) | map('center', 10**6) | join }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "concatenation": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "sum": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "block": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}"
    "{{ n.x }}{% endset %}{% endfor %}",
    "lists of lists": "{% set n = namespace(x=['a']) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_refused(template):
    refused(
        r"the chat template cannot write this chat: .+",
        chat_template.render,
        template,
        said(("user", "a")),
        {},
    )


ALLOWED = {
    "{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}": (
        "1/3False 2/3False 3/3True "
    ),
    "{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{% endfor %}": "x1",
    "{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}'.format('b') }}{{ 'c' | center(3) }}": "a-007   b c ",
    "{% for x in [[1, [2]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}"
    "{% endif %}{% endfor %}": "12",
    "{{ [3, 1] | sort | map('string') | join(',') }}{{ 1700000000 }}": "1,31700000000",
}


@pytest.mark.parametrize(("template", "text"), ALLOWED.items())
def test_allowed(template, text):
    assert chat_template.render(template, said(("user", "a")), {}) == text
