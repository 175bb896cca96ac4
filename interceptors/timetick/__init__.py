"""Ticks of the append path: allocation, acknowledgement in order, confirmed and idle ticks, last-confirmed positions."""
