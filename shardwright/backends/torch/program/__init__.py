"""The recorded step body: a program of unit calls and operations, divided into stages."""
