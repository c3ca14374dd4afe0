"""The README as a package index shows it: a hook of hatchling, called when sdist and wheel are built.

A package index has no files beside the README. Relative links become absolute under `project.urls.Repository` of
pyproject.toml, in the form of GitHub (`…/blob/HEAD/docs/x.md`, `…/raw/HEAD/docs/images/x.svg`). Without that address
links become their words and pictures are left out, so that nothing on the page leads nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def for_package_index(text: str, repository: str = "") -> str:
    """The README without comments and relative links."""

    def replace(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{path})"

    parts = CODE.split(COMMENT.sub("", text))
    shown = "".join(part if index % 2 else LINK.sub(replace, part) for index, part in enumerate(parts))
    return re.sub(r"\n{3,}", "\n\n", shown)


def get_metadata_hook() -> Any:
    """The class that hatchling looks for; made here because hatchling is only there when a package is built."""
    from hatchling.metadata.plugin.interface import (  # pyright: ignore[reportMissingImports]
        MetadataHookInterface,
    )

    class ReadmeHook(MetadataHookInterface):
        def update(self, metadata: dict[str, Any]) -> None:
            text = (Path(self.root) / "README.md").read_text()
            shown = for_package_index(text, metadata.get("urls", {}).get("Repository", ""))
            metadata["readme"] = {"content-type": "text/markdown", "text": shown}

    return ReadmeHook
