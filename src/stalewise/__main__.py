"""`python -m stalewise` is `stalewise`."""

import _signal  # `signal` itself takes a moment to import, in which Ctrl-C would be a traceback


def main() -> None:
    """Run the command line. Ctrl-C while it is being imported ends the process without a word."""
    before = _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from stalewise.cli import main as run

    _signal.signal(_signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
