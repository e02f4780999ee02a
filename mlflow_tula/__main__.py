"""`python -m mlflow_tula` is the `tula` command."""

from mlflow_tula.cli import main

if __name__ == "__main__":
    main()
