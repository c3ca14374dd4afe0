"""Hooks of MkDocs (`make docs`): pages outside of docs/ and notebooks become pages of the site, and links follow them.

Documents link to files of the repository as they lie there, so that they can be read without the site. What they link
to outside of docs/ is copied to `repository/` of the site, and a link to it, or from it, is rewritten.
"""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LISTED = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")  # in the navigation
NOTEBOOKS = "notebooks/"


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(NOTEBOOKS):
        return str(PurePosixPath(path).with_suffix(".md"))
    return f"repository/{path}"


def linked(page: str, text: str) -> list[str]:
    """The files of the repository that a page links to."""
    return [_target(page, found) for part in FENCE.split(text)[::2] for found, _ in LINK.findall(part)]


def rewritten(page: str, text: str) -> str:
    """The page with links as they are in the site."""
    here = os.path.dirname(site_path(page))

    def replace(match: re.Match[str]) -> str:
        target = site_path(_target(page, match[1]))
        return os.path.relpath(target, here or ".") + (match[2] or "")

    parts = FENCE.split(text)
    return "".join(part if index % 2 else LINK.sub(replace, part) for index, part in enumerate(parts))


def _target(page: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


def outside(root: Path) -> set[str]:
    """What pages link to outside of docs/, and so on from there."""
    pages = [str(path.relative_to(root)) for path in sorted(root.glob("docs/**/*.md"))]
    waiting: list[str] = [*pages, *LISTED]
    found: set[str] = {*LISTED}
    while waiting:
        page = waiting.pop()
        if not page.endswith(".md"):
            continue
        for target in linked(page, (root / page).read_text()):
            if not target.startswith(("docs/", NOTEBOOKS)) and target not in found and (root / target).is_file():
                found.add(target)
                waiting.append(target)
    return found


def notebook_markdown(notebook: dict[str, Any]) -> str:
    """The cells of a notebook and what they printed, as Markdown."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        encoded = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
        return f"![output](data:image/svg+xml;base64,{encoded})"
    text = "".join(data.get("text/plain", output.get("text", "")))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""


def on_files(files: Any, config: Any) -> Any:
    """Add pages and files that are not in docs/."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # in .venv-docs

    for path in sorted(outside(ROOT)):
        content = (ROOT / path).read_bytes()
        if path.endswith(".md"):
            content = rewritten(path, content.decode()).encode()
        files.append(File.generated(config, site_path(path), content=content))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        name = str(path.relative_to(ROOT))
        text = rewritten(name, notebook_markdown(json.loads(path.read_text())))
        files.append(File.generated(config, site_path(name), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page in docs/ that lead out of it."""
    if page.file.generated_by is not None:
        return markdown  # done already
    return rewritten(f"docs/{page.file.src_uri}", markdown)
