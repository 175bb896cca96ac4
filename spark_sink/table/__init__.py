"""The open table: its columns, files, statistics and commits in the Delta log."""
