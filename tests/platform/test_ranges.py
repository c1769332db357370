"""Ranges reach a trace where a profiler runs, and are summed up from it."""

import gzip
import json

import pytest
import torch

from megatron.bdlm.platform import ranges
from megatron.bdlm.platform.ranges import RANGES, span, span_each, spanned
from megatron.bdlm.training.traces import TraceError, find_traces, read_trace, table


@spanned("bdlm/tiles")
def work(x):
    return x @ x


def test_ranges_reach_a_trace(tmp_path):
    def arrivals():
        for _ in range(3):
            yield work(torch.ones(64, 64))

    with torch.profiler.profile() as profiler:
        with span("bdlm/step"):
            for arrival in span_each("bdlm/exchange", arrivals()):
                arrival.sum()
    profiler.export_chrome_trace(str(tmp_path / "rank-0.json.gz"))
    totals = read_trace(tmp_path / "rank-0.json.gz")
    # the iterator works four times: for each item, and to find that there is no more
    assert {name: total.calls for name, total in totals.items()} == {"bdlm/step": 1, "bdlm/exchange": 4, "bdlm/tiles": 3}
    assert totals["bdlm/step"].seconds > totals["bdlm/exchange"].seconds > totals["bdlm/tiles"].seconds > 0
    lines = table({"rank-0": totals, "rank-1": {}}).splitlines()
    assert lines[0].split() == ["range", "calls", "rank-0", "rank-1"] and len(lines) == 4
    assert [line.split()[0] for line in lines[1:]] == [name for name in RANGES if name in totals]


def test_without_a_profiler_nothing_is_made(monkeypatch):
    monkeypatch.setattr(torch.profiler, "record_function", None)
    with span("bdlm/step"):
        assert list(span_each("bdlm/exchange", [1, 2])) == [1, 2]
    assert work(torch.ones(2, 2)).sum() == 8 and ranges.span("a") is ranges.span("b")


def test_what_is_no_trace_is_named(tmp_path):
    with pytest.raises(TraceError, match="absent.json: no such file. A run writes rank-N.json.gz to torch_profile"):
        read_trace(tmp_path / "absent.json")
    (tmp_path / "broken.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [')[:-4])
    with pytest.raises(TraceError, match="broken.json.gz: not a Chrome trace"):
        read_trace(tmp_path / "broken.json.gz")
    with pytest.raises(TraceError, match="no rank-N.json.gz in it"):
        find_traces(tmp_path)
    for rank in (10, 9):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"traceEvents": []}))
    assert [file.name for file in find_traces(tmp_path)] == ["rank-9.json", "rank-10.json"]
    assert read_trace(tmp_path / "rank-9.json") == {}
