"""Text from command-line arguments and stdin, checked to be UTF-8."""

import sys


def check_argument(origin: str, text: str) -> str:
    """Check that a command-line argument is valid UTF-8, else raise an error. Returns it as text.

    Invalid bytes are recognised by the lone surrogates to which Python decodes them.

    origin  what the argument is, for the error message
    """
    from regard.data.plain_text import decode_text

    return decode_text(origin, text.encode("utf-8", errors="surrogateescape"))


def read_stdin() -> str:
    """Read all of stdin as UTF-8, whatever the encoding of the system."""
    from regard.data.plain_text import decode_text

    return decode_text("stdin", sys.stdin.buffer.read())
