"""The text that comes with Python: what its own help says of the language, as one text to read.

About half a million characters of English about Python, in every installation and on no network. They are written by
the authors of Python's documentation, under the Python Software Foundation License; they are read where they lie and
not passed on. Another version of Python has a somewhat different text.
"""

from regard.base.errors import DataError


def python_text() -> str:
    """All topics of Python's help in the order of their names, each under its name."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python came without pydoc_data, the text of its help; install the whole standard library, or read "
            "a text of your own with read_text(path)"
        ) from None
    return "\n\n".join(f"{name}\n\n{topics[name].strip()}" for name in sorted(topics)) + "\n"
