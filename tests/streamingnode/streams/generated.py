"""What protoc makes of streams.proto; run as `python -m tests.streamingnode.streams.generated` it writes that beside it."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE = Path("streamingnode/streams/streams.proto")
GENERATED = [SOURCE.with_name("streams_pb2.py"), SOURCE.with_name("streams_pb2.pyi")]


def generate(target: Path) -> None:
    """Write the generated files below `target`."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={target}", f"--pyi_out={target}"]
    subprocess.run([*command, SOURCE.as_posix()], cwd=ROOT, check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        generate(Path(made))
        for name in GENERATED:
            (ROOT / name).write_bytes((Path(made) / name).read_bytes())
