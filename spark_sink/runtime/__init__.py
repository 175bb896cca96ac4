"""Where Spark runs: a Java runtime found on this machine, and the session started with it."""
