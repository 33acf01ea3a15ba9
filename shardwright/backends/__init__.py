"""Translators between the core and the frameworks: one package per framework, loaded on first use."""
