"""Making a damaged node usable again: what can be proven is put back, what is in the way moved aside, the rest named."""
