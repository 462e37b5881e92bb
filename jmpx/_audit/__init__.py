"""Audit: what of a program runs in which dtype, and what leaked."""
