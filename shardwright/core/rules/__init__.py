"""Rules for each kind of op: the dims that belong together, and so the layouts that are legal."""
