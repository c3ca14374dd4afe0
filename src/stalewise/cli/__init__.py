"""The command line. Data goes to stdout, everything else to stderr."""

from stalewise.cli import planning as planning  # each module registers its commands with the app
from stalewise.cli import reporting as reporting
from stalewise.cli import training as training
from stalewise.cli.app import app


def main() -> None:
    """Run the command line."""
    app(prog_name="stalewise")
