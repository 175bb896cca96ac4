"""The append path: one file per concern, joined by `chain` in the order ADR 0003 gives."""
