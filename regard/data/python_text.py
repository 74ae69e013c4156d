"""The built-in text: the topics of Python's help.

The text has about half a million characters of English and is part of every Python installation. It was written by the
authors of Python's documentation, under the Python Software Foundation License. This package reads the text from the
installation and does not ship it. The text differs slightly between versions of Python.
"""

from regard.base.errors import DataError


def python_text() -> str:
    """Return the text of Python's help: all topics, sorted by name, each with its name as a heading.

    >>> python_text().splitlines()[2]
    'The "assert" statement'
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python has no pydoc_data, the text of its help; install the complete standard library, or read "
            "another text with read_text(path)"
        ) from None
    return "\n\n".join(f"{name}\n\n{topics[name].strip()}" for name in sorted(topics)) + "\n"
