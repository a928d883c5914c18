"""Splitting text files by file: determined by relative paths alone."""

import sysconfig
from pathlib import Path

import pytest

from examples.tasks import corpus
from jdist.errors import ConfigError


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_the_split_does_not_depend_on_where_the_folder_lies(tmp_path):
    files = {f"part{i % 3}/file{i}.txt": f"content {i}" for i in range(40)}
    write(tmp_path / "here", files)
    write(tmp_path / "some/where/else", files)
    one = corpus.load([str(tmp_path / "here/**/*.txt")])
    two = corpus.load([str(tmp_path / "some/where/else/**/*.txt")])
    assert one.held_out_files == two.held_out_files
    assert one.held_out.tobytes() == two.held_out.tobytes()
    assert one.train.tobytes() == two.train.tobytes()


def test_every_file_is_on_one_side_whole_and_separated(tmp_path):
    files = {f"f{i:02}.txt": f"<{i}>" for i in range(30)}
    write(tmp_path, files)
    data = corpus.load([str(tmp_path / "*.txt")])
    assert not set(data.train_files) & set(data.held_out_files)
    assert set(data.train_files) | set(data.held_out_files) == set(files)
    assert data.train.tobytes() == b"".join(files[name].encode() + b"\0" for name in data.train_files)
    assert data.held_out.tobytes() == b"".join(files[name].encode() + b"\0" for name in data.held_out_files)
    assert data.train_files == tuple(sorted(data.train_files))


def test_a_file_that_is_added_moves_no_other(tmp_path):
    names = [f"{i}.py" for i in range(200)]
    before, after = corpus.held_out_names(names), corpus.held_out_names([*names, "new.py"])
    assert before == after - {"new.py"}
    assert 8 <= len(before) <= 35


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_files_still_leave_both_sides_filled(count):
    names = [f"{i}.txt" for i in range(count)]
    assert 1 <= len(corpus.held_out_names(names)) < count


def test_the_same_file_by_two_patterns_counts_once(tmp_path):
    write(tmp_path, {"a.txt": "aa", "b.txt": "bb", "empty.txt": ""})
    data = corpus.load([str(tmp_path / "*.txt"), str(tmp_path / "a.*")])
    assert data.train.size + data.held_out.size == 6


def test_files_of_one_name_in_two_roots_are_both_read(tmp_path):
    write(tmp_path, {"one/a.txt": "11", "two/a.txt": "22"})
    data = corpus.load([str(tmp_path / "one/*.txt"), str(tmp_path / "two/*.txt")])
    assert sorted([data.train.tobytes(), data.held_out.tobytes()]) == [b"11\0", b"22\0"]


def test_the_default_is_the_standard_library_without_installed_packages():
    names = [name for name, _ in corpus._standard_library()]
    assert "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name]
    assert len(names) == len(set(names))
    assert (Path(sysconfig.get_paths()["stdlib"]) / names[0]).is_file()


def test_a_pattern_without_files_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\*\.txt' matches no file below"):
        corpus.load([str(tmp_path / "none*.txt")])


def test_one_file_cannot_be_split_by_file(tmp_path):
    write(tmp_path, {"only.txt": "text", "empty.txt": ""})
    with pytest.raises(ConfigError, match=r"gives 1 file\(s\) that are not empty; at least 2"):
        corpus.load([str(tmp_path / "*.txt")])
