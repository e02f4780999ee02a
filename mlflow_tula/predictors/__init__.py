"""One module per predicted quantity; formulas.py holds each equation once, numpy only."""

PORTABLE_FILES: tuple[str, ...] = (
    "checks.py",
    "formulas.py",
    "step_time_formulas.py",
    "sync_formulas.py",
    "memory_formulas.py",
    "convergence_formulas.py",
    "inference.py",
)
"""What a registered model ships: these files predict with numpy and pandas alone."""
