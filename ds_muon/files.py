"""The files that the package writes: into what the user named, and whole or not at all.

All but checkpoints go by ``writing``; those get their names, by ``rename``, when all ranks have written theirs.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ds_muon.say import tell

# What a file system that keeps no bytes in memory may say to ``fsync``.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes become the content of ``path``. Makes its folder.

    A regular file, or a new one, gets its content at the end and at once; an error inside leaves all as it was. Written
    through as they are: devices and pipes, and files that a rename would take from another owner or another name. A
    symbolic link stays: what it leads to is written.

    Raises:
        OSError: it cannot be written.
    """
    if (descriptor := _standard_stream(path)) is not None:
        # To open /dev/stdout anew would write over what stands there, if it leads to a file.
        with open(os.dup(descriptor), "wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _may_be_replaced(path):
        with path.open("wb") as stream:
            yield stream
        return
    # Its name has room where that of the target may have none.
    unfinished = target.with_name(f".ds-muon-{os.getpid()}-{time.monotonic_ns()}")
    try:
        with unfinished.open("xb") as stream:
            yield stream
        with suppress(OSError):  # it is new, or the file system knows no modes
            unfinished.chmod(stat.S_IMODE(target.stat().st_mode))
        try:
            unfinished.replace(target)
        except OSError:  # a file that is mounted by itself, as containers have them
            shutil.copyfile(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def on_disk(path: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes are on the disk, and not only in memory, when the context ends. Overwrites ``path``.

    Raises:
        OSError: they cannot be.
    """
    with path.open("wb") as stream:
        yield stream
        stream.flush()
        try:
            os.fsync(stream.fileno())
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise


def rename(names: Iterable[tuple[Path, Path]]) -> None:
    """Give files other names, each at once and in this order, in place of what bears them. So it is on the disk, too.

    Raises:
        OSError: one cannot be renamed; those before have been.
    """
    folders = set()
    for old, new in names:
        os.replace(old, new)
        folders.add(new.parent)
    for folder in folders:
        with suppress(OSError):  # some file systems open no folder
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``path`` in UTF-8; raises what ``writing`` raises."""
    with writing(path) as stream:
        stream.write(text.encode("utf-8", "backslashreplace"))  # a name may hold half a surrogate pair


def check_writable(path: Path) -> None:
    """Raise what ``writing`` would, before there is anything to write. Leaves nothing behind.

    Raises:
        OSError: whose ``strerror`` says why it cannot be written.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        _check_new(Path(os.path.realpath(path)))
        return
    if stat.S_ISREG(mode):
        os.close(os.open(path, os.O_WRONLY))
    elif stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # Not opened: that waits for a pipe's reader, or ends it, and moves a tape.
    elif stat.S_ISSOCK(mode) or not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def keep(what: str, path: Path, write: Callable[[], object]) -> bool:
    """Write something, and tell where it is or what went wrong: by then a command's findings must not be lost for it.

    Args:
        what: to be called so.
        path: where.
        write: does it.

    Returns:
        Whether it is there.
    """
    try:
        write()
    except Exception as error:  # a disk that has filled up meanwhile, or whatever a library makes of it
        tell(f"ds-muon: {what}: {path} could not be written: {error}", to=sys.stderr)
        return False
    tell(f"{what}: {path}")
    return True


def _standard_stream(path: Path) -> int | None:
    """1 or 2 where the path is what stdout or stderr goes to, as /dev/stdout is."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


def _may_be_replaced(path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    ours = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
    return ours and os.access(Path(os.path.realpath(path)).parent, os.W_OK | os.X_OK)


def _check_new(target: Path) -> None:
    missing = [folder for folder in target.parents if not os.path.exists(folder)]  # the innermost first
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        target.unlink()
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
