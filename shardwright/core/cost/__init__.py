"""Seconds and bytes: of compute, of collectives, of transfers."""
