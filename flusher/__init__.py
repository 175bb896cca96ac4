"""From the log to files: segment buffers, Parquet, cuts, checkpoint, truncation."""
