from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.records import RL_SCHEMA, SFT_SCHEMA, rl_record, sft_record, write_parquet


def test_written_records_are_read_back(tmp_path: Path):
    records = [sft_record("Q?", "A"), sft_record("R?", "B")]
    path = tmp_path / "new" / "folder" / "sft.parquet"
    write_parquet(path, records, SFT_SCHEMA)
    assert pq.read_table(path).to_pylist() == records
    assert pq.read_schema(path).equals(SFT_SCHEMA)
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "sft.parquet"
    write_parquet(path, [sft_record("Q?", "A")], SFT_SCHEMA)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("verl.data.records.pq.write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        write_parquet(path, [], SFT_SCHEMA)
    assert list(tmp_path.iterdir()) == [path]
    assert pq.read_table(path).num_rows == 1


def test_a_record_that_does_not_fit_is_refused(tmp_path: Path):
    record = rl_record(data_source="math", question="Q?", ground_truth="2", split="test", index=0)
    record["extra_info"]["index"] = "first"
    with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError)):
        write_parquet(tmp_path / "rl.parquet", [record], RL_SCHEMA)
    assert list(tmp_path.iterdir()) == []
