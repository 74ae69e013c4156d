"""Text from command-line arguments and stdin, checked to be UTF-8."""

import sys


def check_argument(origin: str, text: str) -> str:
    """An argument as text. Python decodes invalid bytes of arguments to lone surrogates; they raise an error."""
    from regard.data.plain_text import decode_text

    return decode_text(origin, text.encode("utf-8", errors="surrogateescape"))


def read_stdin() -> str:
    """Read all of stdin as UTF-8, whatever the encoding of the system."""
    from regard.data.plain_text import decode_text

    return decode_text("stdin", sys.stdin.buffer.read())
