"""`python -m normfree` runs the command line."""

from normfree.cli import main

if __name__ == "__main__":
    main()
