"""Files that are written: what is there stays what it is, and what cannot be written is known before the work."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import threading
from pathlib import Path

import pytest

from ds_muon.files import check_writable, keep, write_text, writing
from ds_muon.verify import outcome
from ds_muon.verify.outcome import NotShown

ROOT = Path(__file__).parents[3]


def read_in_the_background(path: Path) -> tuple[threading.Thread, list[str]]:
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    thread.start()
    return thread, read


# ---- writing --------------------------------------------------------------------------------------------------------


def test_a_file_has_its_old_content_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_text(path, "old")
    with pytest.raises(KeyError), writing(path) as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_text() == "old"
        raise KeyError
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(path.parent) == ["file"]


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    thread, read = read_in_the_background(path)
    outcome.save([NotShown("slice", "why")], path, as_list=False)
    thread.join(10)
    assert stat.S_ISFIFO(path.stat().st_mode) and '"not_shown": "why"' in read[0]


def test_a_device_stays_one() -> None:
    """A terminal's, for in its folder nothing can be made: no fault of this test may cost the machine a device."""
    ours, theirs = os.openpty()
    path = Path(os.ttyname(theirs))
    check_writable(path)
    outcome.save([NotShown("slice", "why")], path, as_list=False)
    assert path.is_char_device() and b'"not_shown": "why"' in os.read(ours, 1000)
    os.close(theirs)
    os.close(ours)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    if there:
        write_text(target, "old")
    link.symlink_to(target)
    check_writable(link)
    assert link.is_symlink() and target.exists() == there
    outcome.save([NotShown("slice", "why")], link, as_list=False)
    assert link.is_symlink() and '"not_shown": "why"' in target.read_text()


def test_a_file_keeps_its_other_names_and_its_mode(tmp_path: Path) -> None:
    path, other, private = tmp_path / "path", tmp_path / "other", tmp_path / "private"
    path.write_text("old")
    os.link(path, other)
    write_text(path, "new")
    assert other.read_text() == "new" and path.samefile(other)
    private.touch(mode=0o600)
    write_text(private, "secret")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_a_file_that_nothing_may_take_the_place_of_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a container mounts by itself."""

    def busy(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    path = tmp_path / "file"
    path.write_text("a longer old text")
    monkeypatch.setattr(Path, "replace", busy)
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_what_stdout_goes_to_gets_the_text_behind_what_was_printed(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", flush=True)
    write_text(Path("/dev/stdout"), "text\n")
    print("after", flush=True)
    assert capfd.readouterr().out == "before\ntext\nafter\n"


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    check_writable(path)
    write_text(path, "text")
    assert path.read_text() == "text"


def test_half_a_surrogate_pair_can_be_written(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "\udcff")
    assert (tmp_path / "file").read_text() == "\\udcff"


# ---- before the work ------------------------------------------------------------------------------------------------


def test_what_can_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    there = sorted(tmp_path.iterdir())
    for name in ("file", "new", "a/b/c", "pipe", "link"):  # a pipe without a reader, too
        check_writable(tmp_path / name)
    check_writable(Path("/dev/null"))
    assert sorted(tmp_path.iterdir()) == there and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".", "Is a directory"),
        ("file/below", "Not a directory"),
        ("loop", "symbolic links"),
        ("n" * 256, "File name too long"),
        ("m/" + "n" * 256, "File name too long"),
        ("socket", "Permission denied"),
        ("/proc/new", "/proc/new"),  # whatever the system says of a folder where nothing can be made
    ],
)
def test_what_cannot_be_written_is_said_and_nothing_left(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(tmp_path, os.O_RDONLY)  # the path itself may be too long for a socket
        server.bind(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
    with pytest.raises(OSError, match=said):
        check_writable(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "loop", "socket"]


# ---- after it -------------------------------------------------------------------------------------------------------


def test_what_could_not_be_written_is_told_and_not_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not keep("numbers", tmp_path, lambda: write_text(tmp_path, "text"))
    assert keep("numbers", tmp_path / "file", lambda: write_text(tmp_path / "file", "text"))
    out, error = capsys.readouterr()
    assert f"numbers: {tmp_path} could not be written: [Errno 21] Is a directory" in error
    assert out == f"numbers: {tmp_path / 'file'}\n"


def test_nothing_is_written_in_another_way() -> None:
    ways = [r"\.write_(text|bytes)\(", r"open\([^)]*[\"'][wxa]b?[\"']"]
    other = re.compile("|".join([*ways, r"savefig\((?!file|text)", r"torch\.save\(\w+, (?!file)"]))
    sources = [*(ROOT / "ds_muon").rglob("*.py"), ROOT / "scripts" / "demo_train.py"]
    found = {path.name for path in sources if other.search(path.read_text())}
    assert found == {"files.py", "ranks.py"}  # the latter a log, in a folder of its own making
