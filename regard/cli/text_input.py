"""Text from command-line arguments and stdin, checked to be UTF-8."""

import sys


def check_argument(origin: str, text: str) -> str:
    """Check that a command-line argument is valid UTF-8, else raise an error. Returns the argument.

    Python decodes invalid bytes to lone surrogates, by which they are recognised.

    origin  what the argument is, for the error message, such as "the prompt"
    """
    from regard.data.plain_text import decode_text

    return decode_text(origin, text.encode("utf-8", errors="surrogateescape"))


def read_stdin() -> str:
    """Read all of stdin as UTF-8, whatever the encoding of the system."""
    from regard.data.plain_text import decode_text

    return decode_text("stdin", sys.stdin.buffer.read())
