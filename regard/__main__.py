"""Run the command line of regard with `python -m regard`, which works without installation too."""

from regard.cli import main

if __name__ == "__main__":
    main()
