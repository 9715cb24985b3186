"""`python -m orchestrator` is the same command line as `raysume`."""

from orchestrator.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
