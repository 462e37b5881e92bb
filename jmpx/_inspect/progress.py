"""A progress bar for reports that take minutes."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[], object]]:
    """Yields what counts one more of a total, which may be unknown.

    It shows a bar where there is tqdm and one waits.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None:  # outside of the handler, which would show in the traceback of the report
        yield lambda: None
        return
    with tqdm(desc=what, total=total, leave=False, delay=2) as bar:
        yield bar.update
