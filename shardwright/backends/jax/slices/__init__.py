"""Token slices: a microbatch runs slice by slice of its sequences, each behind the keys and values of those before."""
