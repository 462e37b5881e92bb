"""The vision transformer's reader of CIFAR: archives, what it refuses, and a run on one."""

import io
import os
import pickle
import re
import subprocess
import tarfile

import numpy as np
import pytest
from helpers.examples import SMALL, example, run_vit

datasets = example("equinox/datasets.py")


def write_archive(folder, name, contents):
    """Writes the archive of a dataset: pickles, or bytes that stand for one, by member."""
    path = folder / datasets.ARCHIVES[name].file
    with tarfile.open(path, "w:gz") as tar:
        for member, content in contents.items():
            if not isinstance(content, bytes):
                content = pickle.dumps(content, protocol=2)
            information = tarfile.TarInfo(member)
            information.size = len(content)
            tar.addfile(information, io.BytesIO(content))
    return path


def contents_of(name, rng, rows=8):
    archive = datasets.ARCHIVES[name]
    return {
        member: {
            b"batch_label": b"one of them",
            b"data": rng.integers(0, 256, (rows, 3072), np.uint8),
            archive.labels: rng.integers(0, archive.classes, rows).tolist(),
            b"filenames": [b"a.png"] * rows,
        }
        for member in (*archive.train, *archive.test)
    }


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_from_its_archive(name, rng, tmp_path):
    contents = contents_of(name, rng)
    write_archive(tmp_path, name, contents)
    train, test = datasets.load(name, str(tmp_path))
    archive = datasets.ARCHIVES[name]
    for data, members in (train, archive.train), (test, archive.test):
        assert data.images.dtype == np.uint8 and data.labels.dtype == np.int32
        raw = np.concatenate([contents[member][b"data"] for member in members])
        assert data.images.shape == (len(raw), 32, 32, 3)
        for channel in range(3):  # 1024 numbers of red, then of green, then of blue, row by row
            plane = raw[:, 1024 * channel : 1024 * (channel + 1)]
            np.testing.assert_array_equal(data.images[..., channel].reshape(-1, 1024), plane)
        labels = [label for member in members for label in contents[member][archive.labels]]
        np.testing.assert_array_equal(data.labels, labels)
    assert [path.name for path in tmp_path.iterdir()] == [archive.file]  # nothing is unpacked


def python_2_pickle(images, labels):
    """What NumPy under Python 2 wrote: strings without an encoding, another module's name."""

    def string(text):
        return b"T" + len(text).to_bytes(4, "little") + text

    def integer(number):
        return b"J" + number.to_bytes(4, "little", signed=True)

    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + integer(0) + integer(1) + b"tR("
    dtype += integer(3) + string(b"|") + b"NNN" + 2 * integer(-1) + integer(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + integer(0) + b"t"
    array += string(b"b") + b"tR(" + integer(1) + b"(" + b"".join(map(integer, images.shape))
    array += b"t" + dtype + b"I00\n" + string(images.tobytes()) + b"tb"
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def test_pickles_of_python_2_are_read(rng, tmp_path):
    contents = contents_of("cifar10", rng)
    as_python_2 = {
        member: python_2_pickle(content[b"data"], content[b"labels"])
        for member, content in contents.items()
    }
    write_archive(tmp_path, "cifar10", contents)
    expected = datasets.load("cifar10", str(tmp_path))
    write_archive(tmp_path, "cifar10", as_python_2)
    for data, wanted in zip(datasets.load("cifar10", str(tmp_path)), expected, strict=True):
        np.testing.assert_array_equal(data.images, wanted.images)
        np.testing.assert_array_equal(data.labels, wanted.labels)


@pytest.mark.slow  # a training
def test_the_script_trains_on_an_archive(rng, tmp_path):
    write_archive(tmp_path, "cifar100", contents_of("cifar100", rng))
    arguments = [f"--data_dir={tmp_path}", "--patch=16", "--batch_size=4", "--epochs=1", *SMALL]
    result = run_vit("--dataset=cifar100", *arguments)
    assert result.returncode == 0, result.stderr
    assert re.match(r"epoch  1  loss \d\.\d+  test accuracy", result.stdout)


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.thorough
def test_a_hostile_archive_is_refused_with_one_sentence(rng, tmp_path):
    marker = tmp_path / "ran"
    contents = contents_of("cifar10", rng)
    contents["cifar-10-batches-py/data_batch_2"] = {b"data": Payload(os.system, f"touch {marker}")}
    write_archive(tmp_path, "cifar10", contents)
    result = run_vit("--dataset=cifar10", f"--data_dir={tmp_path}", "--patch=4")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "data_batch_2" in line]
    assert f"it asks for the object {os.system.__module__}.system" in line
    assert not marker.exists()


HOSTILE = {
    "builtins.eval": lambda: Payload(eval, "open(marker, 'w')"),
    "numpy.fromfile": lambda: Payload(np.fromfile, "/etc/hostname"),
    "subprocess.Popen": lambda: Payload(subprocess.Popen, ["true"]),
    "an array of dtype 'O8'": lambda: np.array([None]),
    "an array of dtype 'V8'": lambda: np.zeros(2, [("a", "f8")]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plain_value_is_refused(name):
    hostile = pickle.dumps({b"data": HOSTILE[name]()}, protocol=2, fix_imports=False)
    with pytest.raises(ValueError, match="^Refused archive:member, which is not") as error:
        datasets.read_pickle(hostile, "archive:member")
    assert name in str(error.value)


def test_arrays_of_numbers_are_read_as_they_were_written(rng):
    for dtype in ("u1", "<i4", ">i8", "<f4", "?"):
        for order in ("C", "F"):
            array = np.asarray(rng.integers(0, 2, (3, 4)), dtype, order=order)
            read = datasets.read_pickle(pickle.dumps(array, protocol=2), "member").array
            np.testing.assert_array_equal(read, array)
            assert read.dtype == array.dtype


def short(content):
    return {**content, b"data": content[b"data"][:, :-1]}


SPOILED = [
    (short, r"Expected uint8\[n, 3072\] as b'data' of .*test_batch, got uint8\[8, 3071\]\."),
    (lambda c: {**c, b"data": c[b"data"] / 255}, r"got float64\[8, 3072\]"),
    (lambda c: {**c, b"data": b"abc"}, "Expected an array or a list of integers .* got bytes"),
    (lambda c: {**c, b"labels": c[b"labels"][1:]}, r"Expected 8 integers.*test_batch, got int64"),
    (lambda c: {**c, b"labels": [10] * 8}, "Expected labels from 0 to 9 .* got 10 to 10"),
    (lambda c: {b"data": c[b"data"]}, "Expected an entry b'labels' in .*test_batch"),
    (lambda c: [c], "Expected a dict in .*test_batch, got list"),
    (lambda c: pickle.dumps(c, protocol=2)[:-100], "^Refused .*test_batch"),
    (lambda c: b"\x80\x02cnumpy\nndarray\n)R}b.", "^Refused .*test_batch"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_a_member_of_the_wrong_kind_is_refused(spoil, message, rng, tmp_path):
    contents = contents_of("cifar10", rng)
    contents["cifar-10-batches-py/test_batch"] = spoil(contents["cifar-10-batches-py/test_batch"])
    write_archive(tmp_path, "cifar10", contents)
    with pytest.raises(ValueError, match=message) as error:
        datasets.load("cifar10", str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_broken_archive_is_refused(rng, tmp_path):
    contents = contents_of("cifar100", rng)
    path = write_archive(tmp_path, "cifar100", {"cifar-100-python/train": contents.popitem()[1]})
    with pytest.raises(ValueError, match="Expected a file cifar-100-python/test in .*gz"):
        datasets.load("cifar100", str(tmp_path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="Cannot read .*cifar-100-python.tar.gz"):
        datasets.load("cifar100", str(tmp_path))
    path.write_text("not a tar")
    with pytest.raises(ValueError, match="Cannot read .*cifar-100-python.tar.gz"):
        datasets.load("cifar100", str(tmp_path))
