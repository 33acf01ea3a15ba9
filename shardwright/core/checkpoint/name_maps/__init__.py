"""Maps of names that come with the library, a TOML file for each family of models."""
