"""Schedule families, one per file; `catalogue.py` beside this folder lists them."""
