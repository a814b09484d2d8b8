"""Chat templates that would never end or fill the memory are refused in one line."""

import jinja2.filters
import pytest

from chat_cases import QWEN3, said
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
    "translate": "{{ ('a' * 10**6).translate({97: 'x' * 10**6}) }}",
    "join of a text": "{{ ('x' * 10**6).join('y' * 10**6) }}",
    "join of a generator": "{{ range(99999) | map('string') | join('x' * 10**6) }}",
    "join method of a generator": "{{ ('x' * 10**6).join(range(99999) | map('string')) }}",
    "replace by name": "{{ ('a' * 10**6) | replace(old='a', new='b' * 10**6) }}",
    "widths": "{{ ('%999999d' * 900) % ((1,) * 900) }}",
    "widths of a method": "{{ ('{:999999}' * 900).format(*([1] * 900)) }}",
    "small percent star": "{{ ('%*d' * 900) % ((999999, 1) * 900) }}",
    "tojson of many": "{{ ([1] * 10**5) | tojson(indent=10**6) }}",
    "tojson by a text": "{{ ([1] * 10**5) | tojson(indent='x' * 10**6) }}",
    "indent of other line ends": "{{ ('a\r' * 10**6) | indent(10**6) }}",
    "wordwrap": "{{ ('x ' * 10**5) | wordwrap(1, wrapstring='y' * 10**6) }}",
    "quadratic wordwrap": "{{ ('x' * 10**7) | wordwrap(1) }}",
    "urlize": "{{ ('.' * 10**5 ~ 'a') | urlize }}",
    "striptags": "{{ ('<!---->' * 10**6) | striptags }}",
    "striptags method": "{{ (('<!---->' * 10**6) | safe).striptags() }}",
    "sum of lists": "{{ ([[1]] * 90000) | sum(start=[]) }}",
    "strftime": "{{ strftime_now('%255d' * 10**6) }}",
    "encode": "{{ ('a' * 10**5).encode('punycode') }}",
    "bytes": "{{ 'a'.encode() * 10**9 }}",
    "to_bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "numbers": "{{ [10**4000] * 190000 }}",
    "recursive text": "{% for c in 'a' recursive %}text{{ loop('x' * 10**7) if not loop.depth0 }}"
    "{% endfor %}",
    "one concatenation": "{% set b = 'x' * 10**7 %}{{ b " + "~ b " * 900 + "}}",
    "variables": "".join(f"{{% set b{i} = 'x' * 10**7 %}}" for i in range(99)),
    "slices": "{% set b = 'x' * 10**7 %}{% set n = namespace(x=0) %}{% for i in range(999) %}"
    "{% set n.x = namespace(before=n.x, b=b[1:]) %}{% endfor %}",
    "comparison of lists of lists": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "hash of tuples of tuples": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "hash of a deep tuple": "{% set n = namespace(x=(1,)) %}{% for i in range(99999) %}"
    "{% set n.x = (n.x,) %}{% endfor %}{{ {n.x: 1} }}",
    "views": "{% set n = namespace(x=1) %}{% for i in range(60) %}"
    "{% set n.x = {'a': [n.x, n.x]}.items() %}{% endfor %}{{ n.x }}",
    "size": "{{ 1 }}" * 10**5,
    "depth": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long message": "{{ raise_exception('x' * 10**7) }}",
    "long comparisons": "{% set b = 'x' * 10**7 %}{% for i in range(99999) %}{{ 'ab' in b }}"
    "{% endfor %}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_refused(template, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    refused(
        r"the chat template cannot write this chat: .{1,1000}$",
        chat_template.render,
        template,
        said(("user", "a")),
        {},
    )
    assert isinstance(chat_template.variables(template), tuple)


# Those whose time and result grow as their input.
PLAIN = {
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("filesizeformat", "float", "forceescape", "groupby", "int", "items", "last", "length"),
    *("list", "lower", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "safe"),
    *("select", "selectattr", "sort", "string", "trim", "truncate", "unique", "upper", "xmlattr"),
    *("casefold", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal"),
    *("isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle"),
    *("isupper", "lstrip", "maketrans", "partition", "removeprefix", "removesuffix", "rfind"),
    *("rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
    "swapcase",
}


def test_each_filter_and_each_method_of_a_text_is_known():
    limited = {*chat_template.LONGEST, *chat_template.GROWTH, *chat_template.NUMBERED}
    names = {*jinja2.filters.FILTERS, *(name for name in dir(str) if not name.startswith("_"))}
    assert names <= limited | PLAIN and not limited & PLAIN


ALLOWED = {
    "{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}": (
        "1/3False 2/3False 3/3True "
    ),
    "{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{% endfor %}": "x1",
    "{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}'.format('b') }}{{ 'c' | center(3) }}": "a-007   b c ",
    "{% for x in [[1, [2]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}"
    "{% endif %}{% endfor %}": "12",
    "{{ [3, 1] | sort | map('string') | join(',') }}{{ 1700000000 }}": "1,31700000000",
    "{% set n = namespace(t=1700000000) %}{{ '{{{}}}'.format(n.t) }}{{ 'a'.join(['b', 'c']) }}": (
        "{1700000000}bac"
    ),
    "{% autoescape true %}{{ '<' | safe ~ '<' }}{% endautoescape %}{{ '<' ~ 1 ~ [2] }}": (
        "<&lt;<1[2]"
    ),
    "{% set a, b = 1, [2, 3] %}{% for x in b[::-1] if x != a %}{{ x }}{% endfor %}": "32",
}


@pytest.mark.parametrize(("template", "text"), ALLOWED.items())
def test_allowed(template, text):
    assert chat_template.render(template, said(("user", "a")), {}) == text


def test_a_chat_may_have_thousands_of_messages():
    turns = [("user" if i % 2 == 0 else "assistant", f"message {i}") for i in range(2000)]
    assert chat_template.render(QWEN3, said(*turns), {}).count("message ") == 2000
