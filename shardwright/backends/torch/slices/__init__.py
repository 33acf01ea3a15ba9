"""Token slices: a model's units run slice by slice of a sequence, each behind the keys and values of those before."""
