"""Whether a node's data is what was written: walks over every byte of it, and what they found. Nothing is changed here."""
