"""The traced step as flat equations, and its cut into stages."""
