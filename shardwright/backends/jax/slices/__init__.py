"""Token slices: the program of a microbatch run slice by slice of its sequence, each behind the keys and values of those
before."""
