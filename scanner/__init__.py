"""Reads a log: deliver policies, catch-up and tailing, ordering, transaction assembly, filters,
named readers.
"""
