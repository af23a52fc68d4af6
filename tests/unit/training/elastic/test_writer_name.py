"""Names of the processes that share a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from ringfort.training.elastic.writer_name import WriterName


def test_each_process_has_a_name_of_its_own_and_gets_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first, second = WriterName(folder), WriterName(folder)
    assert (first.name, second.name) == ("w0", "w1")
    first.close()
    first.close()
    again = WriterName(folder)
    assert again.name == "w0"
    again.close()
    second.close()


def test_a_folder_that_cannot_be_made_is_not_an_error_yet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    names = [WriterName(tmp_path / "file" / "folder") for _ in range(2)]
    assert names[0].name != names[1].name
    assert all(name.name.isalnum() and name.name.islower() for name in names)
    for name in names:
        name.close()
