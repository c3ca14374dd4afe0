"""Examples in docstrings as blocks of code of the site (`make docs`): Markdown reads their `>>>` as a quotation.

An extension of griffe, which reads the docstrings for mkdocs.yml.
"""

from __future__ import annotations

import re
from typing import Any

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """The docstring with each example, up to an empty line, in a block of code; one with blocks stays as it is."""
    return docstring if "```" in docstring else EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", docstring)


try:
    from griffe import Extension  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
except ModuleNotFoundError:  # in the tests, which have no tools of the site
    Extension = object


class Examples(Extension):  # pyright: ignore[reportUntypedBaseClass, reportGeneralTypeIssues]
    """What griffe calls for each object that it has read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
