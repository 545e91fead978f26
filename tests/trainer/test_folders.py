"""Folders that cannot be written, or whose name is too long for the sockets in them, are found before anything starts."""

import datetime
import errno
import os
import re
import socket
import tempfile
import uuid
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlframe.config import ConfigError
from trainer.cluster import doctor, folders
from trainer.cluster.folders import check_run_dir, check_temporary_folder, temporary_folder_fault

AS_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
LARGEST_PROCESS = 2**22
"""The largest process number of Linux."""


def refusal(run_dir) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run_dir(str(run_dir))
    message = str(caught.value)
    assert message.startswith(f"run_dir={run_dir} ") and message.endswith(".") and "\n" not in message
    return message


def test_a_folder_that_is_there_or_can_be_made_passes_and_is_not_made(tmp_path, monkeypatch):
    check_run_dir(str(tmp_path))
    check_run_dir(str(tmp_path / "a" / "b"))
    (tmp_path / "link").symlink_to(tmp_path)
    check_run_dir(str(tmp_path / "link" / "a"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    check_run_dir("runs/name")
    check_run_dir("~/runs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link"]


def test_a_file_and_what_lies_below_one(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    assert " is a file; " in refusal(file)
    assert f" lies below {file}, which is a file; " in refusal(file / "a" / "b")
    (tmp_path / "link").symlink_to(file)
    assert " is a file; " in refusal(tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    assert f" lies below {file}, which is a file; " in refusal("file/run")


def test_a_link_to_nothing(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    assert " is a link to nothing; " in refusal(link)
    assert f" lies below {link}, which is a link to nothing; " in refusal(link / "run")
    with pytest.raises(OSError):
        link.mkdir(parents=True)


def test_a_circle_of_links(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    refusal(tmp_path / "a")
    refusal(tmp_path / "a" / "run")


def test_a_name_that_the_file_system_does_not_take(tmp_path):
    assert os.strerror(errno.ENAMETOOLONG) in refusal(tmp_path / ("x" * 256))
    assert "null byte" in refusal(f"{tmp_path}/a\0b")
    check_run_dir(str(tmp_path / ("x" * 255)))


@AS_ROOT
def test_a_folder_without_permission(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert " cannot be written (no permission); " in refusal(closed)
    assert f" cannot be made (no permission in {closed}); " in refusal(closed / "run")


def test_a_folder_without_permission_by_what_the_system_says(tmp_path, monkeypatch):
    """For root, whom no folder of a test is closed to."""
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr(folders.os, "access", lambda path, mode: Path(path) != closed)
    assert " cannot be written (no permission); " in refusal(closed)
    assert f" cannot be made (no permission in {closed}); " in refusal(closed / "run")


def binds(path: str) -> bool:
    """Whether a unix socket can be bound at ``path``, whose folder is there."""
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.bind(path)
        except OSError as error:
            assert "too long" in str(error)
            return False
    os.unlink(path)
    return True


def folder_of(length: int, root: Path) -> str:
    """An existing folder below ``root`` whose path has ``length`` bytes."""
    name = "x" * (length - len(os.fsencode(str(root))) - 1)
    (root / name).mkdir()
    return str(root / name)


@pytest.fixture
def short():
    """A folder with a short name; tmp_path is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("variable", "inside"),
    [("RAY_TMPDIR", folders.RAY_SOCKET), ("TMPDIR", folders.ENGINE_SOCKET)],
)
def test_the_limit_is_that_of_a_real_socket(short, variable, inside):
    environment = {"RAY_TMPDIR": "/tmp", "TMPDIR": "/tmp"}
    room = folders.SOCKET_BYTES - 1 - len(inside)
    for length, wanted in ((room, True), (room + 1, False)):
        folder = folder_of(length, short)
        path = f"{folder}/{inside}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        assert binds(path) == wanted
        fault = temporary_folder_fault({**environment, variable: folder})
        assert (fault is None) == wanted, fault
    assert fault.startswith(f"{variable}={folder} is {room + 1} bytes long")
    assert re.search(rf"at most {room} bytes, such as /tmp$", fault) and f"take {folders.SOCKET_BYTES} bytes" in fault


def test_bytes_are_counted_and_not_letters(short):
    room = folders.SOCKET_BYTES - 1 - len(folders.RAY_SOCKET)
    folder = short / ("ö" * ((room - len(str(short))) // 2 + 1))
    folder.mkdir()
    assert len(str(folder)) <= room < len(os.fsencode(folder))
    fault = temporary_folder_fault({"RAY_TMPDIR": str(folder)})
    assert f"is {len(os.fsencode(folder))} bytes long" in fault


def test_the_variable_that_decides_is_the_one_named(short):
    long = folder_of(90, short)
    assert temporary_folder_fault({"TMPDIR": long, "RAY_TMPDIR": "/tmp"}).startswith("TMPDIR=")
    assert temporary_folder_fault({"TMPDIR": long}).startswith("TMPDIR=")
    assert temporary_folder_fault({"TMPDIR": "/tmp", "RAY_TMPDIR": long}).startswith("RAY_TMPDIR=")
    assert temporary_folder_fault({"TMPDIR": "/tmp"}) is None and temporary_folder_fault({}) is None


def test_a_temporary_folder_that_is_a_file_is_named(short):
    (short / "file").touch()
    fault = temporary_folder_fault({"TMPDIR": str(short / "file")})
    assert fault.startswith(f"TMPDIR={short}/file is a file; set TMPDIR to a folder")


def test_ray_itself_refuses_one_byte_more(short):
    """Ray's own check of the name of its longest socket, in a session as it names them."""
    ray_node = pytest.importorskip("ray._private.node")
    room = folders.SOCKET_BYTES - 1 - len(folders.RAY_SOCKET)
    session = f"session_{datetime.datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{LARGEST_PROCESS}"
    for length, wanted in ((room, True), (room + 1, False)):
        temporary = folder_of(length, short)
        sockets = f"{temporary}/ray/{session}/sockets"
        environment = {"RAY_TMPDIR": temporary, "TMPDIR": "/tmp"}
        assert (temporary_folder_fault(environment) is None) == wanted
        with nullcontext() if wanted else pytest.raises(OSError, match="AF_UNIX path length"):
            ray_node.validate_socket_filepath(f"{sockets}/plasma_store")


def test_ray_and_engines_take_the_folders_that_are_looked_at(short, monkeypatch):
    """What Ray reads from the environment, and the name that vLLM gives a socket."""
    ray_utils = pytest.importorskip("ray._common.utils")
    long = folder_of(90, short)
    for environment in ({"TMPDIR": long}, {"RAY_TMPDIR": long, "TMPDIR": "/tmp"}):
        for name in ("TMPDIR", "RAY_TMPDIR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert ray_utils.get_default_system_temp_dir() == long
        assert temporary_folder_fault(environment).startswith(f"{next(iter(environment))}={long} ")
    assert len(str(uuid.uuid4())) == len(folders.ENGINE_SOCKET)


def test_the_refusal_of_a_run_and_the_finding_of_doctor_say_what_to_set(short, monkeypatch):
    long = folder_of(90, short)
    finding = doctor.temporary_folder({"TMPDIR": long, "RAY_TMPDIR": "/tmp"})
    assert finding.text.startswith(f"TMPDIR={long} is 90 bytes long") and finding.todo.startswith("set TMPDIR to a folder")
    assert doctor.temporary_folder({"TMPDIR": "/tmp"}).todo is None
    monkeypatch.setattr(folders, "temporary_folder_fault", lambda: "TMPDIR=x is long; set it")
    with pytest.raises(ConfigError, match=r"^TMPDIR=x is long; set it\.$"):
        check_temporary_folder()
