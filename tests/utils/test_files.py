from pathlib import Path

import pytest

from verl.utils.files import replace_text, replacing


def test_an_error_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    replace_text(path, "old\r\n\u6570")
    with pytest.raises(OSError, match="disk full"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old\r\n\xe6\x95\xb0"
