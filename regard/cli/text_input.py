"""Text as it was typed after a command, or comes through stdin: UTF-8, or an error that says where it is not."""

import sys


def typed(origin: str, text: str) -> str:
    """An argument; a system hands over as lone surrogates the bytes that it cannot read."""
    from regard.data.plain_text import decode_text

    return decode_text(origin, text.encode("utf-8", errors="surrogateescape"))


def from_stdin() -> str:
    """All of stdin; as text, it would be of whatever kind the system thinks."""
    from regard.data.plain_text import decode_text

    return decode_text("stdin", sys.stdin.buffer.read())
