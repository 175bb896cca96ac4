"""An ingest with a Spark session of its own making, whose JVM is killed with SIGKILL under it so
often.

Run as `python -m tests.spark_sink.lost_jvm <node> <tables> <losses>`. Exits with 3 when it gave up.
"""

import os
import signal
import sys
from pathlib import Path

from spark_sink import commit
from spark_sink.ingestion import IngestJob
from spark_sink.runtime import LazySession
from spark_sink.tables import write_rows
from wal.errors import StorageFailed

GAVE_UP = 3


def main(node: str, tables: str, losses: int) -> None:
    sessions = LazySession(pause=lambda _: None)
    lost = [0]

    def write_without_jvm(parts: object, directory: Path) -> None:
        if lost[0] < losses:
            lost[0] += 1
            (directory / "_partition=_default").mkdir(parents=True)
            (directory / "_partition=_default" / "part-00000.parquet").write_bytes(b"half a file")
            jvm = sessions.get().sparkContext._jvm
            assert jvm is not None
            os.kill(int(jvm.java.lang.ProcessHandle.current().pid()), signal.SIGKILL)
        write_rows(parts, directory)  # type: ignore[arg-type]

    vars(commit)["write_rows"] = write_without_jvm
    try:
        IngestJob(sessions, Path(node), Path(tables), progress=lambda *_: None).run()
    except StorageFailed:
        sys.exit(GAVE_UP)
    finally:
        sessions.close()
    assert lost[0] == losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
