"""`python -m stalewise` is `stalewise`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C while it is being imported ends the process without a word."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from stalewise.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
