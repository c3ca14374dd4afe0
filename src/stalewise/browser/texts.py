"""Token ids to texts, one by one, with the tokenizer that lies in the run's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from stalewise.checkpoints import checkpoint_directory, versions
from stalewise.inspection import visible


class TokenTexts:
    """Decodes tokens of a run; ids as text where the run has no tokenizer."""

    def __init__(self, run: Path) -> None:
        paths = [checkpoint_directory(run, version) / "tokenizer.json" for version in reversed(versions(run))]
        tokenizer = next((found for path in paths if (found := _load(path)) is not None), None)
        self._decode = None if tokenizer is None else lru_cache(maxsize=None)(partial(_decode_one, tokenizer))

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._decode is not None

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return [f"⟨{token}⟩" for token in ids] if self._decode is None else [self._decode(token) for token in ids]


def _load(path: Path) -> Any:
    """The tokenizer in a file; None where there is none, or none that can be read."""
    from tokenizers import Tokenizer  # the Rust library alone: transformers would take seconds to import

    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # what the library raises has no class of its own
        return None


def _decode_one(tokenizer: Any, token: int) -> str:
    """The text of a token inside of a response: many decoders cut a space off what comes first."""
    once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    return twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once


def shown(text: str) -> str:
    r"""A token's text on a page: nothing in it can move the text around it, and line breaks are seen.

    >>> shown("a\n\u202eb")
    'a↵\n\\u202eb'
    """
    return "".join("↵\n" if character == "\n" else visible(character) for character in text)
