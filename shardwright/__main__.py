"""``python -m shardwright``: the command line, for where its script is not on the path."""

from shardwright.cli import main

if __name__ == "__main__":
    main()
