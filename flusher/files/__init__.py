"""Rows become files in the node's directory: Arrow columns, checksummed Parquet, durable renames."""
