"""The command line. Data goes to stdout, everything else to stderr."""

import gc

from stalewise.cli import planning as planning  # each module registers its commands with the app
from stalewise.cli import reporting as reporting
from stalewise.cli import training as training
from stalewise.cli.app import app


def main() -> None:
    """Run the command line."""
    try:
        app(prog_name="stalewise")
    finally:
        gc.freeze()  # a process that ends need not search the objects of torch and transformers for garbage
