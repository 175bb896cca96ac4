"""Streamed transactions: the session's state machine, the live sessions, the interceptor, the rollback worker."""
