"""A Nsight Systems export, made from the public schema, tells the same as the Kineto trace of the same work."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from diagnose import causes
from diagnose.kineto_maker import Kineto
from headway.account.errors import UserError
from headway.diagnose.diagnosis import diagnose_job
from headway.diagnose.facts import RankFacts
from headway.diagnose.job import Options, read_job

# As `nsys export --type sqlite` writes them, columns that Headway does not read left out.
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT, busLocation TEXT, totalMemory INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
  globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER,
  gridX INTEGER, gridY INTEGER, gridZ INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  value INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
  category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
  domainId INTEGER);
"""
PROCESS = 4321 * (1 << 24)


class Export:
    """Writes a Kineto trace of the tests as an export."""

    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA)
        self.texts: dict[str, int] = {}

    def text(self, value: str) -> int:
        return self.texts.setdefault(value, len(self.texts) + 1)

    def add(self, table: str, **values: object) -> None:
        marks = ", ".join("?" for _ in values)
        self.database.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))

    def event(self, event: dict[str, object]) -> None:
        args = event["args"]
        assert isinstance(args, dict)
        start = round(float(str(event["ts"])) * 1000)
        end = start + round(float(str(event["dur"])) * 1000)
        name, thread = str(event["name"]), PROCESS + int(str(event["tid"]))
        if event["cat"] == "kernel":
            self.add("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, deviceId=0, contextId=1,
                     streamId=args["stream"], correlationId=args["correlation"], globalPid=PROCESS,
                     demangledName=self.text(name), shortName=self.text(name[:8]))  # fmt: skip
        elif event["cat"] == "cuda_runtime":
            self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, eventClass=0, globalTid=thread,
                     correlationId=args["correlation"], nameId=self.text(f"{name}_v7000"), returnValue=0)  # fmt: skip
        else:
            shapes = f", seq = 3, sizes = {args['Input Dims']}" if "Input Dims" in args else ""
            self.add("NVTX_EVENTS", start=start, end=end, eventType=59, globalTid=thread, domainId=0,
                     **({"text": name + shapes} if shapes else {"textId": self.text(name)}))  # fmt: skip

    def close(self, device: str = "NVIDIA H100 80GB HBM3") -> None:
        self.database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, text) for text, n in self.texts.items()])
        self.add("TARGET_INFO_GPU", id=0, name=device)
        self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_790_857_026_000_000_000)
        self.database.commit()
        self.database.close()


def exported(path: Path, trace: Kineto) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    export = Export(path)
    for event in trace.events:
        if event["ph"] == "X":
            export.event(event)
    export.close(trace.device)
    return path


def of(path: Path, window: str = "auto") -> RankFacts:
    return read_job([path], Options(window=window)).ranks[0]


@pytest.mark.parametrize(
    "make", [causes.fragmented, causes.reads_every_layer, lambda: causes.loader([3000.0]), causes.eager_attention]
)
def test_it_tells_the_same_as_kineto(make: object, tmp_path: Path) -> None:
    trace = make()  # type: ignore[operator]
    mine, kineto = of(exported(tmp_path / "a.sqlite", trace)), of(trace.write(tmp_path / "a.json.gz"))
    assert mine.device().shares == kineto.device().shares
    assert mine.device().account == kineto.device().account
    assert mine.device().name == kineto.device().name and mine.base_ns == 1_790_857_026_000_000_000
    assert [row.name for row in mine.device().steps.rows] == [row.name for row in kineto.device().steps.rows]
    names = [
        [item.name for item in diagnose_job(read_job([path])).findings]
        for path in (tmp_path / "a.sqlite", tmp_path / "a.json.gz")
    ]
    assert names[0] == names[1] != []


def test_copies_and_fills_are_memory(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    common = {"deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": 5, "globalPid": PROCESS}
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", start=0, end=100, **common, demangledName=export.text("gemm"), shortName=1)
    export.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=100, end=160, **common, bytes=64, copyKind=8)
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", start=170, end=200, **common, value=0, bytes=32)
    export.close()
    shares = of(tmp_path / "a.sqlite", "gpu").device().shares
    assert (shares.compute_ns, shares.exposed_mem_ns, shares.idle_ns) == (100, 90, 10)
    assert of(tmp_path / "a.sqlite").device().events.size.tolist() == [-1, 64, 32]


def test_shapes_of_emit_nvtx_are_read(tmp_path: Path) -> None:
    rank = of(exported(tmp_path / "a.sqlite", causes.few_elementwise()))
    assert "[[8192, 2048], [2048, 2048]]" in rank.shapes
    assert "aten::mm" in rank.names and not any("seq =" in name for name in rank.names)


def test_a_range_that_never_ended_is_counted(tmp_path: Path) -> None:
    path = exported(tmp_path / "a.sqlite", causes.few_elementwise())
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO NVTX_EVENTS (start, end, eventType, text) VALUES (5, NULL, 59, 'open')")
    rank = of(path)
    assert rank.damage.lost == {"event without an end": 1} and rank.damage.partial


def test_an_export_without_gpu_work_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    Export(tmp_path / "empty.sqlite").close()
    with pytest.raises(UserError, match="no GPU work"):
        of(tmp_path / "empty.sqlite")
    path = exported(tmp_path / "cut.sqlite", causes.few_elementwise())
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be read"):
        of(path)
    with sqlite3.connect(tmp_path / "other.sqlite") as database:
        database.execute("CREATE TABLE songs (name TEXT)")
    with pytest.raises(UserError, match="no Nsight Systems export"):
        of(tmp_path / "other.sqlite")
    report = tmp_path / "a.nsys-rep"
    report.write_bytes(b"something")
    with pytest.raises(UserError, match="nsys export"):
        of(report)
