"""`python -m stalewise` is `stalewise`."""

from stalewise.cli import main

if __name__ == "__main__":
    main()
