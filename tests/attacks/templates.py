"""Chat templates that try to read, to run, or to use the machine up. What grows is bounded by the limits under test.

`REFUSED` must end in one clear error; `HARMLESS` may render, but never what it is after.
"""

import shutil
from pathlib import Path
from typing import Any

REFUSED: dict[str, str] = {
    "loops without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a range that is too large": "{% for a in range(10000000000) %}x{% endfor %}",
    "a long text by multiplication": "{{ 'x' * 3000000000 }}",
    "a long text by doubling": "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}"
    "{% endfor %}{{ n.a }}",
    "a long text by adding": "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(40) %}{% set n.a = n.a + n.a %}"
    "{% endfor %}{{ n.a }}",
    "a long list": "{% set n = namespace(a=[1, 2, 3]) %}{% for i in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "a wide number": "{{ '%3000000000d' % 1 }}",
    "a wide format": "{{ '{:>3000000000}'.format(1) }}",
    "a centred text": "{{ 'x' | center(3000000000) }}",
    "a large power": "{{ 9 ** 999999999 }}",
    "a power and its digits": "{{ (7 ** 3000000) | string | length }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "many lines": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "a text that is replaced again and again": "{% set n = namespace(a='xx') %}{% for i in range(40) %}"
    "{% set n.a = n.a | replace('x', 'xx') %}{% endfor %}{{ n.a }}",
    "nested too deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "a file that is included": "{% include '/etc/passwd' %}",
    "a file that is imported": "{% import '/etc/passwd' as x %}{{ x }}",
    "a parent": "{% extends '/etc/passwd' %}",
    "the subclasses of object": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__['__builtins__'] }}",
    "a format that reaches in": "{{ '{0.__class__.__mro__}'.format('') }}",
    "messages that change": "{{ messages.append(1) }}",
    "a template that is not one": "{% for %}",
    "a refusal": "{{ raise_exception('no') }}",
    "a module": "{{ joiner.__init__.__globals__.os.system('touch ESCAPED') }}",
    "a generator's frame": "{{ (messages | map(attribute='x')).gi_frame.f_builtins }}",
    "a bomb of filters": "{{ ('x' * 90000) | list | join('x' * 90000) }}",
}
HARMLESS: dict[str, str] = {
    "attributes by filter": "{{ '' | attr('__class__') }}",
    "the environment": "{{ self.__init__ }}{{ environ }}{{ config }}",
    "a request": "{{ request }}{{ url_for }}",
    "the clock": "{{ strftime_now('%Y') if strftime_now is defined else '' }}",
    "special tokens": "{{ messages[-1].content }}",
}


def with_template(directory: Path, template: str) -> Any:
    """A tokenizer with this chat template, in a copy of an embedded policy."""
    from stalewise.models import EMBEDDED
    from stalewise.models.loading import load_tokenizer

    shutil.copytree(EMBEDDED / "arithmetic", directory)
    (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(directory))
