"""`python -m edgellm` is `edgellm`."""

from edgellm.cli import main

if __name__ == "__main__":
    main()
