"""Migrates files: shows a diff of each, lists what is left to do, and writes them."""

import dataclasses
import difflib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

# A file without any of these has nothing to migrate.
_WORDS = ("dynamic_scale", "jmp", "mixed_precision", "mpx")


@dataclasses.dataclass(frozen=True)
class File:
    """A migrated file: its path, both texts, the number of edits, and what is left by line."""

    path: Path
    before: str
    after: str
    edits: int
    marks: tuple[tuple[int, str], ...]

    def diff(self) -> str:
        """Returns the unified diff, empty if nothing changes."""
        texts = (self.before.splitlines(keepends=True), self.after.splitlines(keepends=True))
        names = (str(self.path), f"{self.path} (migrated)")
        lines = difflib.unified_diff(*texts, *names)
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

    def write(self) -> None:
        """Replaces the file at once, with its mode kept; of a link, the file that it leads to."""
        path = self.path.resolve()
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False) as new:
            new.write(self.after.encode(errors="surrogateescape"))
        try:
            os.chmod(new.name, path.stat().st_mode)
            os.replace(new.name, path)
        except OSError:
            os.unlink(new.name)
            raise

    def written(self) -> "File":
        """Returns the file after it was written, or with the reason why it was not."""
        try:
            self.write()
        except OSError as error:
            return _left(self.path, self.before, f"not written: {error}")
        return self


def migrate_files(paths: Iterable[str], write: bool) -> Iterator[str]:
    """Yields the lines of a report, after all files have been read, and written if asked to.

    Files that cannot be read, parsed or written are listed under what is left to do.

    Args:
        paths: files, and folders whose `.py` files are taken.
        write: whether to write the files.

    Raises:
        ValueError: if a file does not exist or is a notebook, or libcst is not installed.
    """
    files = [_migrated(path) for path in _python_files(paths)]
    if write:
        files = [file.written() if file.before != file.after else file for file in files]
    changed = [file for file in files if file.before != file.after]
    for file in changed:
        yield file.diff()
    marks = [f"{file.path}:{line}: {words}" for file in files for line, words in file.marks]
    if marks:
        yield "\n".join(["Left to do:", *marks, ""])
    edits = sum(file.edits for file in files)
    end = f"{len(changed)} written" if write else "nothing written (--write writes)"
    yield f"{_count(len(files), 'file')}, {_count(edits, 'edit')}, {len(marks)} left to do; {end}"


def _python_files(paths: Iterable[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.suffix == ".ipynb":
            raise ValueError(f"Cannot migrate the notebook {path}: export it as a .py file.")
        if not path.exists():
            raise ValueError(f"Cannot find {path}: give Python files or folders of them.")
        inside = sorted(each for each in path.rglob("*.py") if not each.is_dir())
        found |= dict.fromkeys(inside if path.is_dir() else [path])
    return list(found)


def _migrated(path: Path) -> File:
    try:
        if path.exists() and not path.is_file():
            return _left(path, "", "left as it is, no file")  # a pipe, which has no end
        before = path.read_bytes().decode(errors="surrogateescape")  # with its line ends
    except OSError as error:
        return _left(path, "", f"left as it is: {error}")
    if not any(word in before for word in _WORDS):
        return File(path, before, before, 0, ())
    try:
        import libcst

        from jmpx._migrate.edits import migrate_source
    except ModuleNotFoundError as error:
        raise ValueError("migrate needs libcst: pip install 'jmpx[migrate]'.") from error
    try:
        new = migrate_source(before)
    except (RecursionError, MemoryError):
        return _left(path, before, "left as it is: an expression is nested too deeply")
    except (UnicodeError, SyntaxError, libcst.ParserSyntaxError) as error:
        return _left(path, before, f"left as it is, no Python: {error}")
    except Exception as error:  # of libcst: it ends no other file
        return _left(path, before, f"left as it is: {type(error).__name__}: {error}")
    return File(path, before, new.text, new.edits, new.marks)


def _left(path: Path, text: str, reason: str) -> File:
    return File(path, text, text, 0, ((1, " ".join(reason.split())),))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
