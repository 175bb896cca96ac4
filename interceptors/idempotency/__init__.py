"""Retries that change nothing: results of earlier writes by producer and sequence, in front of the append path."""
