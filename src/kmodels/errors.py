"""The one error that is the user's to mend."""


class InputError(ValueError):
    """A setting or a file given by the user is wrong.

    The message is one line: what was given, what is allowed, what to do. Recipes and the command
    line print it alone, without a stack trace, and end with exit code 2.
    """
