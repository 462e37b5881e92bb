"""The images that the examples train on: scikit-learn's digits, CIFAR-10 and CIFAR-100."""

import io
import pickle
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

TEST_SHARE = 0.2


class Data(NamedTuple):
    """Images of shape [n, side, side, channels] in uint8, and their int32 labels of shape [n]."""

    images: np.ndarray
    labels: np.ndarray


class Archive(NamedTuple):
    """The names of the files and entries of an official CIFAR archive for Python."""

    file: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: bytes
    classes: int


ARCHIVES = {
    "cifar10": Archive(
        "cifar-10-python.tar.gz",
        tuple(f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6)),
        ("cifar-10-batches-py/test_batch",),
        b"labels",
        10,
    ),
    "cifar100": Archive(
        "cifar-100-python.tar.gz",
        ("cifar-100-python/train",),
        ("cifar-100-python/test",),
        b"fine_labels",
        100,
    ),
}
NAMES = ("digits", *ARCHIVES)


def side_of(name: str) -> int:
    """Returns the width and height in pixels of a dataset's images."""
    return 8 if name == "digits" else 32


def shape_of(name: str) -> tuple[int, int, int]:
    """Returns the shape of a dataset's images."""
    return side_of(name), side_of(name), 1 if name == "digits" else 3


def classes_of(name: str) -> int:
    """Returns how many classes a dataset has."""
    return 10 if name == "digits" else ARCHIVES[name].classes


def load(name: str, directory: str | None) -> tuple[Data, Data]:
    """Returns the training and the test images of a dataset.

    Args:
        name: one of `NAMES`.
        directory: the one that holds the archive of a CIFAR dataset.

    Raises:
        ValueError: if the archive cannot be read or its content is wrong; the message says where.
    """
    if name == "digits":
        return load_digits()
    return load_cifar(Path(directory or ".") / ARCHIVES[name].file, ARCHIVES[name])


def batches(data: Data, size: int, rng: np.random.Generator) -> Iterator[Data]:
    """Yields the full batches of one epoch, shuffled."""
    order = rng.permutation(len(data.labels))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield Data(data.images[chosen], data.labels[chosen])


def prepared(batch: Data) -> Data:
    """Returns float32 images, from -1 to 1, in place of uint8: a policy may cast arguments."""
    images: Any = jnp.asarray(batch.images, jnp.float32) / 127.5 - 1
    return batch._replace(images=images)


def load_digits() -> tuple[Data, Data]:
    """Returns the training and the test images: a fixed, shuffled, stratified split."""
    from sklearn import datasets, model_selection

    digits: Any = datasets.load_digits()  # scikit-learn has no types
    images = np.rint(digits.images[..., None] * (255 / 16)).astype(np.uint8)
    parts: Any = model_selection.train_test_split(
        images,
        digits.target.astype(np.int32),
        test_size=TEST_SHARE,
        stratify=digits.target,
        random_state=0,
    )
    train_x, test_x, train_y, test_y = parts
    return Data(train_x, train_y), Data(test_x, test_y)


def load_cifar(path: Path, archive: Archive) -> tuple[Data, Data]:
    """Returns the training and the test images of an archive; nothing is unpacked on disk."""
    try:
        with tarfile.open(path) as tar:
            train = [read_batch(tar, path, member, archive) for member in archive.train]
            test = [read_batch(tar, path, member, archive) for member in archive.test]
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"Cannot read {path}, expected a tar archive: {error}.") from error
    return join(train), join(test)


def join(batches: list[Data]) -> Data:
    return Data(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))


def read_batch(tar: tarfile.TarFile, path: Path, member: str, archive: Archive) -> Data:
    """Reads one pickled batch of an archive, in memory, and checks it."""
    where = f"{path}:{member}"
    try:
        file = tar.extractfile(member)
    except KeyError:
        file = None
    if file is None:
        raise ValueError(f"Expected a file {member} in {path}, found none: get the official one.")
    content = read_pickle(file.read(), where)
    if not isinstance(content, dict):
        raise ValueError(f"Expected a dict in {where}, got {type(content).__name__}.")
    images, labels = entry(content, b"data", where), entry(content, archive.labels, where)
    if images.ndim != 2 or images.shape[1] != 3072 or images.dtype != np.uint8:
        raise ValueError(
            f"Expected uint8[n, 3072] as b'data' of {where}, got {images.dtype}"
            f"{list(images.shape)}."
        )
    integers = np.issubdtype(labels.dtype, np.integer)
    if labels.shape != images.shape[:1] or not integers or len(labels) == 0:
        raise ValueError(
            f"Expected {len(images)} integers, one for each image, as {archive.labels!r} of "
            f"{where}, got {labels.dtype}{list(labels.shape)}."
        )
    if labels.min() < 0 or labels.max() >= archive.classes:
        raise ValueError(
            f"Expected labels from 0 to {archive.classes - 1} as {archive.labels!r} of {where}, "
            f"got {labels.min()} to {labels.max()}."
        )
    images = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # each color is a plane
    return Data(np.ascontiguousarray(images), labels.astype(np.int32))


def entry(content: dict[Any, Any], key: bytes, where: str) -> np.ndarray:
    """Returns an entry of a batch, a pickled array or a list of integers, as an array."""
    if key not in content:
        raise ValueError(f"Expected an entry {key!r} in {where}, got {sorted(map(repr, content))}.")
    value = content[key]
    if isinstance(value, PickledArray):
        return value.array
    if isinstance(value, list) and all(type(item) is int for item in value):
        return np.array(value)
    raise ValueError(
        f"Expected an array or a list of integers as {key!r} of {where}, got "
        f"{type(value).__name__}."
    )


class PickledArray:
    """Takes the place of `numpy.ndarray` in a pickle.

    NumPy's own constructors trust the pickle: if it declares numbers to be objects, they read
    memory at any address. This class reads numbers only.
    """

    array = np.zeros(0)

    def __init__(self, *ignored: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, in_columns, data = state
        array = np.frombuffer(data, dtype.dtype)
        self.array = array.reshape(shape, order="F" if in_columns else "C")


class PickledDtype:
    """Takes the place of `numpy.dtype` in a pickle, for booleans and numbers."""

    def __init__(self, name: str | bytes, *ignored: Any) -> None:
        text = as_text(name)
        if not re.fullmatch("[biuf][1248]", text):
            raise pickle.UnpicklingError(f"it holds an array of dtype {text!r}")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        order: Any = as_text(state[1])  # NumPy refuses what is no byte order
        self.dtype = self.dtype.newbyteorder(order)


def as_text(name: str | bytes) -> str:
    return name.decode("ascii") if isinstance(name, bytes) else name


def latin1(text: str, encoding: str | bytes) -> bytes:
    """Takes the place of `_codecs.encode`, by which pickles of protocol 2 store bytes."""
    if as_text(encoding) != "latin1":
        raise pickle.UnpicklingError(f"it encodes bytes as {encoding!r}")
    return text.encode("latin1")


class ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, numbers, strings, bytes, lists, tuples and dicts, and refuses anything else."""

    admitted = {
        ("numpy.core.multiarray", "_reconstruct"): PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): PickledArray,
        ("numpy", "ndarray"): PickledArray,
        ("numpy", "dtype"): PickledDtype,
        ("_codecs", "encode"): latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.admitted:
            raise pickle.UnpicklingError(f"it asks for the object {module}.{name}")
        return self.admitted[module, name]


def read_pickle(content: bytes, where: str) -> Any:
    """Reads a pickle of Python 2 or 3 that holds arrays and plain values."""
    try:
        return ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    # A pickle is a program, so a broken one may raise any exception.
    except Exception as error:
        raise ValueError(
            f"Refused {where}, which is not a pickle of arrays, numbers, strings, lists and dicts: "
            f"{error}."
        ) from error
