"""The quality table in small, on the real model: who recalls how much, in which order."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import quality

ROW = quality.Row("quest", 0.1, 0.8, (0.7, None, 0.9), 0.1, 1.05, 0.2, 3)


def test_a_run_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    log = quality.Log(quality.QUICK, path)
    log.rows["quest", 0.1] = ROW
    log.filters, log.dense_passkey = "2+8", 4
    log.save()
    again = quality.Log(replace(quality.QUICK, ways=("window",)), path)
    assert (again.rows, again.filters, again.dense_passkey) == (log.rows, "2+8", 4)
    with pytest.raises(SystemExit, match="another plan"):
        quality.Log(replace(quality.QUICK, steps=99), path)


def test_the_page_has_the_table() -> None:
    page = quality.markdown(quality.Result([ROW], 4, "2+8"), quality.QUICK)
    assert "| quest | 10% | 0.800 | 0.700 | - | 0.900 | 0.1000 | 1.050 | 20.0% | 3/2 |" in page


@pytest.mark.nightly
@pytest.mark.model
def test_who_looks_at_the_query_recalls_more() -> None:
    with quality.Bench(quality.QUICK) as bench:
        result = bench.run(quality.Log(quality.QUICK))
    rows = {row.way: row for row in result.rows}
    recall = {way: row.recall for way, row in rows.items()}
    # By bands of layers: omnikv selects in fewer, so its mean over all is one over others.
    for row in rows.values():
        pairs = zip(rows["oracle"].bands, row.bands, strict=True)
        assert all(best >= other for best, other in pairs if other is not None), row.way
    for way in ("quest", "arkbox"):
        assert recall[way] > recall["window"]
        # Where the model looks far back the difference is large.
        assert rows[way].bands[0] > rows["window"].bands[0] + 0.05
        assert rows[way].kl < rows["window"].kl
    assert all(row.kl > 0.0 and 0.0 <= row.new <= 1.0 for row in rows.values())
    assert rows["window"].passkey == 0
    assert rows["oracle"].passkey >= rows["window"].passkey
