"""A progress bar for reports that take minutes."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], object]]:
    """Yields what counts one more of a total; it shows a bar where there is tqdm and one waits."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(desc=what, total=total, leave=False, delay=2) as bar:
        yield bar.update
