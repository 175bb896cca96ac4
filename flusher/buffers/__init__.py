"""Rows since the last cut: in memory, and in the files being written, per segment and per vchannel of deletes."""
