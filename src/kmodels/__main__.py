"""`python -m kmodels`, which is the `kmodels` command."""

from kmodels.tools.cli import main

if __name__ == "__main__":
    main()
