"""What exists on one log and where its rows go: catalog, growing segments, row offsets, cuts."""
