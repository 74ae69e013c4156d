"""`python -m regard` is the command line, installed or not."""

from regard.cli import main

if __name__ == "__main__":
    main()
