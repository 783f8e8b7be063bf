"""The one exception a user sees: a sentence, not a traceback."""


class InputError(ValueError):
    """Bad input: the message says what it is, what was found, what was expected and what to do.

    Commands print it on stderr and exit with code 2.
    """
