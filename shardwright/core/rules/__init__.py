"""Rules per kind of op: which dims belong together, and so which layouts are legal."""
