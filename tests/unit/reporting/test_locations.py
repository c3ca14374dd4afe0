"""Where the batches of a run are."""

from __future__ import annotations

from pathlib import Path

from rollout_runs import (
    index_of,
    start_run,
)
from stalewise.store import batch_directories
from stalewise.store.atomic import write_json_atomic


def test_batches_of_another_run_are_found(own: Path, tmp_path: Path) -> None:
    learned = start_run(tmp_path / "learned")
    batch = batch_directories(own / "rollouts")[0]
    write_json_atomic(learned / "sources.json", {"batches": [{"directory": str(batch), "updates": 4}]})
    assert index_of(learned).table.num_rows == 160
    write_json_atomic(learned / "sources.json", {"batches": [{"directory": str(batch), "updates": 4}] * 2})
    assert [place.key for place in index_of(learned).batches] == ["0:g000000-v000000", "1:g000000-v000000"]
