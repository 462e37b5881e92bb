"""What messages to a user have in common: the place, the nearest word, the value, the line."""

import contextlib
import functools
import os
import reprlib
import sys
import traceback

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def did_you_mean(word: str, choices: list[str] | dict[str, str]) -> str:
    """Returns the end of an error message: `; did you mean 'x'?`, or a full stop.

    The choices are words, or a dict from such words to what to suggest for them.
    """
    import difflib  # here, because only errors need it

    known = choices if isinstance(choices, dict) else {choice: choice for choice in choices}
    word = word.strip()
    near = [n for w in (word, word.lower()) for n in difflib.get_close_matches(w, known, n=1)]
    return f"; did you mean {known[near[0]]!r}?" if near else "."


def user_stacklevel(*packages: str) -> int:
    """Returns the `stacklevel` at which the caller's `warnings.warn` names the user's line.

    Lines of jmpx, of these packages, of Python's contexts and decorators, and of the constructors
    that dataclasses generate ("<string>") are not the user's.
    Python 3.11 lacks the `skip_file_prefixes` of `warnings.warn`.
    """
    loaded = [sys.modules[name] for name in ("jmpx", *packages) if name in sys.modules]
    folders = [os.path.dirname(module.__file__ or "") + os.sep for module in loaded]
    others = (*folders, contextlib.__file__, functools.__file__, "<string>")
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    levels = (n for n, frame in enumerate(stack) if not frame.filename.startswith(others))
    return next(levels, len(stack) - 1)


def describe(value: object) -> str:
    """Returns the `repr` of any value on one line, shortened if it is long or deeply nested."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python does not write integers of more than some thousand digits.
        text = f"<{type(value).__name__}>"
    return " ".join(text.splitlines())
