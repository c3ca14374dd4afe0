"""`python -m stalewise` is `stalewise`."""

# `signal` itself takes a moment to import, in which Ctrl-C would be a traceback.
import _signal  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Run the command line. Ctrl-C ends the process without a word until a command has begun."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # not where it is ignored
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from stalewise.cli import main as run

    run()


if __name__ == "__main__":
    main()
