"""An ingest in a process of its own, on the JVM of the test session, that kills itself with SIGKILL at a named step.

Run as `python -m tests.spark_sink.ingestion.killed_ingest <node> <tables> <step or ->` with the JVM's gateway in
the environment.
"""

import os
import signal
import sys
from pathlib import Path

from spark_sink.commit import Step
from spark_sink.ingestion import IngestJob
from tests.chaos.borrowed_spark import borrowed_session


def main(node: str, tables: str, last_step: str) -> None:
    def on_step(step: Step) -> None:
        if step.value == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    job = IngestJob(borrowed_session(), Path(node), Path(tables), progress=lambda *_: None, on_step=on_step)
    job.run()
    os._exit(0)  # the JVM is not ours to stop


if __name__ == "__main__":
    main(*sys.argv[1:])
